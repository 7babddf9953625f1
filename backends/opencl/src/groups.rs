//! Which ops of a program are run together when there are few rows.
//!
//! A token is a few hundred kernels that each take microseconds, so every launch that is spared counts: norms move into the products that read
//! them, products of one input run as one, gates and residual sums happen where a product ends. With many rows (prompts) the same group runs op by op:
//! there launches cost nothing, and products are blocked. Scratch is planned over groups: everything that a group reads and makes is alive at once.

use std::collections::HashMap;
use tegula_sdk::program::{Dim, Op, OpKind, Program, ValueId, ValueKind};

/// Ops that run together; indices into the program, in an order that can be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) ops: Vec<usize>,
    pub(crate) form: Form,
}

/// How a group runs with few rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Form {
    /// Op by op.
    Plain,
    /// Two ropes that turn by the same angles.
    Ropes,
    /// Products that share their input.
    Products {
        /// The RMS norm whose result they read.
        norm: Option<usize>,
        /// The products, each with the sum that adds its result to a residual.
        products: Vec<(usize, Option<usize>)>,
        /// The gated unit of the two products.
        glu: Option<usize>,
    },
}

struct Reader<'a> {
    program: &'a Program,
    /// Ops that read a value.
    readers: HashMap<ValueId, Vec<usize>>,
    /// The op that makes a value.
    maker: HashMap<ValueId, usize>,
    taken: Vec<bool>,
    /// Whether a weight lies in one tile, so that it can be an argument beside others.
    is_whole: &'a dyn Fn(ValueId) -> bool,
}

/// Groups all ops of a program.
pub(crate) fn group(program: &Program, is_whole: &dyn Fn(ValueId) -> bool) -> Vec<Group> {
    let mut readers: HashMap<ValueId, Vec<usize>> = HashMap::new();
    let mut maker = HashMap::new();
    for (index, op) in program.ops.iter().enumerate() {
        for id in &op.inputs {
            let list = readers.entry(*id).or_default();
            if list.last() != Some(&index) {
                list.push(index);
            }
        }
        for id in &op.outputs {
            maker.insert(*id, index);
        }
    }
    let taken = vec![false; program.ops.len()];
    let mut reader = Reader { program, readers, maker, taken, is_whole };
    let mut groups = Vec::new();
    for index in 0..program.ops.len() {
        if reader.taken[index] {
            continue;
        }
        let group = reader.products(index).or_else(|| reader.ropes(index));
        let group = group.unwrap_or_else(|| Group { ops: vec![index], form: Form::Plain });
        for op in &group.ops {
            reader.taken[*op] = true;
        }
        groups.push(group);
    }
    groups
}

impl Reader<'_> {
    fn op(&self, index: usize) -> &Op {
        &self.program.ops[index]
    }

    /// The only value an op makes.
    fn result(&self, index: usize) -> Option<ValueId> {
        self.op(index).outputs.first().copied()
    }

    /// The ops that read what an op makes, unless the core wants it too.
    fn inner_readers(&self, index: usize) -> Option<&[usize]> {
        let id = self.result(index)?;
        if self.program.outputs.contains(&id) {
            return None;
        }
        self.readers.get(&id).map(Vec::as_slice)
    }

    /// Whether a value is there before op `index` runs in the order of groups.
    fn is_there(&self, id: ValueId, index: usize) -> bool {
        self.maker.get(&id).is_none_or(|maker| self.taken[*maker] || *maker < index)
    }

    /// A product of a weight in one tile.
    fn is_product(&self, index: usize) -> bool {
        let op = self.op(index);
        matches!(op.kind, OpKind::Matmul)
            && !self.taken[index]
            && op.inputs.get(1).is_some_and(|weight| (self.is_whole)(*weight))
    }

    /// A group that begins with op `index`: a norm, or a product.
    fn products(&self, index: usize) -> Option<Group> {
        let op = self.op(index);
        let is_norm = match op.kind {
            // Of whole rows, with a weight.
            OpKind::RmsNorm { n, .. } => {
                let row = self.program.value(*op.inputs.first()?).ok()?.row_len();
                u64::from(n) == row && op.inputs.len() == 2
            }
            _ => false,
        };
        let (norm, mut products) = if is_norm {
            let readers = self.inner_readers(index)?;
            let all = readers.iter().all(|reader| {
                self.is_product(*reader)
                    && self.op(*reader).inputs.first() == self.op(index).outputs.first()
            });
            if !all || readers.is_empty() || readers.len() > 8 {
                return None;
            }
            (Some(index), readers.to_vec())
        } else if self.is_product(index) {
            let x = op.inputs.first()?;
            let same = self.readers.get(x).map_or(&[][..], Vec::as_slice);
            let together: Vec<_> = same
                .iter()
                .copied()
                .filter(|i| {
                    *i >= index && self.is_product(*i) && self.op(*i).inputs.first() == Some(x)
                })
                .take(8)
                .collect();
            (None, together)
        } else {
            return None;
        };
        // What is brought forward must not need what is made between.
        products.retain(|p| self.op(*p).inputs.iter().skip(1).all(|id| self.is_there(*id, index)));
        if norm.is_some() && products.len() != self.inner_readers(index)?.len() {
            return None;
        }
        let glu = self.glu_of(&products);
        let products: Vec<_> = products
            .into_iter()
            .map(|p| (p, if glu.is_none() { self.sum_of(p, index) } else { None }))
            .collect();
        let mut ops: Vec<usize> = norm.into_iter().collect();
        ops.extend(products.iter().flat_map(|(p, sum)| [Some(*p), *sum]).flatten());
        ops.extend(glu);
        Some(Group { ops, form: Form::Products { norm, products, glu } })
    }

    /// A rope and the next one that turns by the same angles and needs nothing that is made between.
    fn ropes(&self, index: usize) -> Option<Group> {
        let op = self.op(index);
        let OpKind::Rope { .. } = op.kind else { return None };
        let positions = op.inputs.get(1)?;
        let is_alike = |i: &usize| {
            let other = self.op(*i);
            *i > index
                && !self.taken[*i]
                && other.kind == op.kind
                && other.inputs.get(1..) == op.inputs.get(1..)
                && other.inputs.first().is_some_and(|x| self.is_there(*x, index))
        };
        let next = self.readers.get(positions)?.iter().copied().find(is_alike)?;
        Some(Group { ops: vec![index, next], form: Form::Ropes })
    }

    /// The gated unit that is the only reader of exactly two products without bias.
    fn glu_of(&self, products: &[usize]) -> Option<usize> {
        let &[a, b] = products else { return None };
        let (&[glu], &[other]) = (self.inner_readers(a)?, self.inner_readers(b)?) else {
            return None;
        };
        let op = self.op(glu);
        let shape = |i: usize| {
            let op = self.op(i);
            let weight = self.program.value(*op.inputs.get(1)?).ok()?;
            Some((weight.dtype, weight.dims.clone(), op.inputs.len()))
        };
        let fits = glu == other
            && matches!(op.kind, OpKind::Glu { .. })
            && op.inputs.first() != op.inputs.get(1)
            && shape(a)? == shape(b)?
            && shape(a)?.2 == 2;
        fits.then_some(glu)
    }

    /// The sum that is the only reader of a product, and adds to it what is there already.
    fn sum_of(&self, product: usize, index: usize) -> Option<usize> {
        let &[sum] = self.inner_readers(product)? else { return None };
        let op = self.op(sum);
        let result = self.result(product)?;
        let other = match op.inputs.as_slice() {
            [a, b] if *a == result && *b != result => *b,
            [a, b] if *b == result && *a != result => *a,
            _ => return None,
        };
        let value = self.program.value(other).ok()?;
        let fits = matches!(op.kind, OpKind::Add)
            && !self.taken[sum]
            && value.kind != ValueKind::Weight
            && self.is_there(other, index);
        fits.then_some(sum)
    }
}

/// The program as scratch is planned for it: one op for each group, which reads and makes all that its ops do.
pub(crate) fn planned(program: &Program, groups: &[Group]) -> Program {
    let ops = groups.iter().map(|group| {
        let mut inputs: Vec<ValueId> = Vec::new();
        let mut outputs = Vec::new();
        for op in group.ops.iter().filter_map(|i| program.ops.get(*i)) {
            inputs.extend(&op.inputs);
            outputs.extend(&op.outputs);
        }
        let first = group.ops.first().and_then(|i| program.ops.get(*i));
        let kind = first.map_or(OpKind::Add, |op| op.kind);
        Op { kind, layer: first.and_then(|op| op.layer), inputs, outputs }
    });
    Program { ops: ops.collect(), ..program.clone() }
}

/// Rows of what an op makes, or of what it reads.
pub(crate) fn rows_of(program: &Program, id: ValueId) -> Dim {
    program.value(id).map_or(Dim::Fixed(1), tegula_sdk::program::Value::rows)
}
