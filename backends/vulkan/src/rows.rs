//! Ops that move rows and columns, or rank what stands in a row.

use crate::pipelines::Kernel;
use crate::push::Push;
use crate::record::{Groups, Recorder};
use crate::shaders::Shader;
use crate::steps::Context;
use tegula_sdk::program::{Op, ValueId};
use tegula_sdk::{Error, Result};

impl Context<'_> {
    /// Columns of one value to columns of another.
    pub(crate) fn copy(
        &self,
        recorder: &mut Recorder<'_>,
        (src, begin): (ValueId, u32),
        (dst, dst_begin): (ValueId, u32),
        n_cols: u32,
        rows: Option<ValueId>,
    ) -> Result<()> {
        let n = self.rows(dst)?;
        let push = Push::new()
            .u64(self.at(src))
            .u64(self.at(dst))
            .u64(rows.map_or(0, |id| self.at(id)))
            .u32(n_cols)
            .u32(n)
            .u32(self.row_len(src)?)
            .u32(begin)
            .u32(self.row_len(dst)?)
            .u32(dst_begin)
            .u32(self.rows(src)?);
        let mut reads = vec![self.whole(src)?];
        if let Some(rows) = rows {
            reads.push(self.whole(rows)?);
        }
        let kernel = Kernel::new(Shader::Copy, &[]);
        let groups = Groups::strided(u64::from(n) * u64::from(n_cols), 256);
        recorder.run(&kernel, &push, groups, &reads, &[self.whole(dst)?])
    }

    pub(crate) fn argmax(&self, recorder: &mut Recorder<'_>, x: ValueId, y: ValueId) -> Result<()> {
        let n = self.rows(x)?;
        let push = Push::new().u64(self.at(x)).u64(self.at(y)).u32(self.row_len(x)?).u32(n);
        let kernel = Kernel::new(Shader::Argmax, &[]);
        let groups = Groups::Are([n.min(32_768), 1, 1]);
        recorder.run(&kernel, &push, groups, &[self.whole(x)?], &[self.whole(y)?])
    }

    pub(crate) fn top_k(
        &self,
        recorder: &mut Recorder<'_>,
        x: ValueId,
        op: &Op,
        k: u32,
    ) -> Result<()> {
        let [ids, values] = op.outputs.as_slice() else {
            return Err(Error::invalid("top_k makes two values"));
        };
        let n = self.rows(x)?;
        let push = Push::new()
            .u64(self.at(x))
            .u64(self.at(*ids))
            .u64(self.at(*values))
            .u32(self.row_len(x)?)
            .u32(n)
            .u32(k);
        let kernel = Kernel::new(Shader::TopK, &[]);
        let groups = Groups::Are([n.min(32_768), 1, 1]);
        let writes = [self.whole(*ids)?, self.whole(*values)?];
        recorder.run(&kernel, &push, groups, &[self.whole(x)?], &writes)
    }

    /// The same columns of every group: a group is to the kernel what a row is to it elsewhere.
    pub(crate) fn slice_groups(
        &self,
        recorder: &mut Recorder<'_>,
        (src, dst): (ValueId, ValueId),
        group: u32,
        (begin, len): (u32, u32),
    ) -> Result<()> {
        let n = u64::from(self.rows(dst)?) * u64::from(self.row_len(src)? / group.max(1));
        let n_groups = u32::try_from(n).map_err(|_| Error::unsupported("2^32 groups"))?;
        let push = Push::new()
            .u64(self.at(src))
            .u64(self.at(dst))
            .u64(0)
            .u32(len)
            .u32(n_groups)
            .u32(group)
            .u32(begin)
            .u32(len)
            .u32(0)
            .u32(n_groups);
        let kernel = Kernel::new(Shader::Copy, &[]);
        let groups = Groups::strided(n * u64::from(len), 256);
        recorder.run(&kernel, &push, groups, &[self.whole(src)?], &[self.whole(dst)?])
    }
}
