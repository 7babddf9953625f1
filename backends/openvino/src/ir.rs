//! OpenVINO's intermediate representation, written as text with its constants beside it.
//!
//! A model is layers with numbered ports and edges between them. Shapes inside follow from those of inputs and constants, so ports carry none.
//! Constants are first only counted; their bytes are written once the whole size is known, into memory that OpenVINO owns, so that a large
//! table is never in memory twice on our side.

use crate::ov::{Element, Tensor};
use std::fmt::Write;
use tegula_sdk::program::ValueId;
use tegula_sdk::{Error, Result};

/// An output port of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Port {
    layer: usize,
    port: usize,
}

/// One dimension: a number, or open.
pub(crate) type Dims<'a> = &'a [i64];
/// A dimension given at run time.
pub(crate) const OPEN: i64 = -1;
/// Alignment of every constant.
const ALIGNMENT: u64 = 64;

/// Bytes of a constant: small ones at hand, others by the number under which the writer knows them.
#[derive(Debug)]
pub(crate) enum Fill {
    Bytes(Vec<u8>),
    /// A part of rows of a weight; parts as [`crate::weights::Form::parts`] counts them.
    Weight {
        value: ValueId,
        part: usize,
        first_row: u64,
        n_rows: u64,
    },
}

/// A constant's place.
#[derive(Debug)]
pub(crate) struct Blob {
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(crate) fill: Fill,
}

/// A model being written.
#[derive(Debug, Default)]
pub(crate) struct Ir {
    layers: String,
    edges: String,
    n_layers: usize,
    pub(crate) blobs: Vec<Blob>,
    /// Bytes of all constants.
    pub(crate) size: u64,
}

fn precision(element: Element) -> &'static str {
    match element {
        Element::F16 => "FP16",
        Element::BF16 => "BF16",
        Element::I32 => "I32",
        Element::I64 => "I64",
        Element::I8 => "I8",
        Element::U8 => "U8",
        Element::I4 => "I4",
        Element::U4 => "U4",
        _ => "FP32",
    }
}

fn name(element: Element) -> &'static str {
    match element {
        Element::F16 => "f16",
        Element::BF16 => "bf16",
        Element::I32 => "i32",
        Element::I64 => "i64",
        Element::I8 => "i8",
        Element::U8 => "u8",
        Element::I4 => "i4",
        Element::U4 => "u4",
        _ => "f32",
    }
}

fn shape(dims: Dims<'_>) -> String {
    let dims = dims.iter().map(|d| if *d < 0 { "?".into() } else { d.to_string() });
    dims.collect::<Vec<String>>().join(",")
}

fn ports(out: &mut String, dims: Dims<'_>) {
    for d in dims {
        let _ = write!(out, "<dim>{d}</dim>");
    }
}

impl Ir {
    fn open(&mut self, kind: &str, opset: &str, data: &str) -> usize {
        let id = self.n_layers;
        self.n_layers += 1;
        let _ = write!(
            self.layers,
            "<layer id=\"{id}\" name=\"{}{id}\" type=\"{kind}\" version=\"{opset}\">",
            kind.to_lowercase()
        );
        if !data.is_empty() {
            let _ = write!(self.layers, "<data {data}/>");
        }
        id
    }

    fn source(&mut self, element: Element, dims: Dims<'_>, id: usize) -> Port {
        let _ = write!(self.layers, "<output><port id=\"0\" precision=\"{}\">", precision(element));
        ports(&mut self.layers, dims);
        self.layers.push_str("</port></output></layer>");
        Port { layer: id, port: 0 }
    }

    /// An input of the model. Inputs are numbered in the order in which they are made.
    pub(crate) fn parameter(&mut self, element: Element, dims: Dims<'_>) -> Port {
        let data = format!("shape=\"{}\" element_type=\"{}\"", shape(dims), name(element));
        let id = self.open("Parameter", "opset1", &data);
        self.source(element, dims, id)
    }

    /// An output of the model. Outputs are numbered in the order in which they are made.
    pub(crate) fn result(&mut self, value: Port) {
        let id = self.open("Result", "opset1", "");
        self.inputs(id, &[value]);
        self.layers.push_str("</layer>");
    }

    /// A constant of `size` bytes.
    pub(crate) fn constant(
        &mut self,
        element: Element,
        dims: Dims<'_>,
        size: u64,
        fill: Fill,
    ) -> Result<Port> {
        let fault = || Error::invalid("a model with more than 2^64 bytes of constants");
        let offset = self.size.checked_next_multiple_of(ALIGNMENT).ok_or_else(fault)?;
        self.size = offset.checked_add(size).ok_or_else(fault)?;
        self.blobs.push(Blob { offset, size, fill });
        let data = format!(
            "element_type=\"{}\" shape=\"{}\" offset=\"{offset}\" size=\"{size}\"",
            name(element),
            shape(dims)
        );
        let id = self.open("Const", "opset1", &data);
        Ok(self.source(element, dims, id))
    }

    /// Numbers of a constant vector.
    pub(crate) fn i64s(&mut self, values: &[i64]) -> Result<Port> {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let (size, dims) = (bytes.len() as u64, [values.len() as i64]);
        self.constant(Element::I64, &dims, size, Fill::Bytes(bytes))
    }

    /// A constant number that is broadcast.
    pub(crate) fn scalar(&mut self, value: f32) -> Result<Port> {
        self.constant(Element::F32, &[1], 4, Fill::Bytes(value.to_le_bytes().to_vec()))
    }

    fn inputs(&mut self, id: usize, inputs: &[Port]) {
        self.layers.push_str("<input>");
        for (i, from) in inputs.iter().enumerate() {
            let _ = write!(self.layers, "<port id=\"{i}\" precision=\"FP32\"/>");
            let _ = write!(
                self.edges,
                "<edge from-layer=\"{}\" from-port=\"{}\" to-layer=\"{id}\" to-port=\"{i}\"/>",
                from.layer, from.port
            );
        }
        self.layers.push_str("</input>");
    }

    /// A layer with one output.
    pub(crate) fn op(&mut self, kind: &str, opset: &str, data: &str, inputs: &[Port]) -> Port {
        self.op_n(kind, opset, data, inputs, 1)
            .first()
            .copied()
            .unwrap_or(Port { layer: 0, port: 0 })
    }

    /// A layer with `n` outputs.
    pub(crate) fn op_n(
        &mut self,
        kind: &str,
        opset: &str,
        data: &str,
        inputs: &[Port],
        n: usize,
    ) -> Vec<Port> {
        let id = self.open(kind, opset, data);
        self.inputs(id, inputs);
        self.layers.push_str("<output>");
        for i in 0..n {
            let _ = write!(self.layers, "<port id=\"{}\" precision=\"FP32\"/>", inputs.len() + i);
        }
        self.layers.push_str("</output></layer>");
        (0..n).map(|i| Port { layer: id, port: inputs.len() + i }).collect()
    }

    /// Elementwise with broadcasting, and other ops of the first set without attributes.
    pub(crate) fn simple(&mut self, kind: &str, inputs: &[Port]) -> Port {
        self.op(kind, "opset1", "", inputs)
    }

    pub(crate) fn convert(&mut self, value: Port, to: Element) -> Port {
        self.op("Convert", "opset1", &format!("destination_type=\"{}\"", name(to)), &[value])
    }

    /// `dims` may hold one -1, which is found.
    pub(crate) fn reshape(&mut self, value: Port, dims: &[i64]) -> Result<Port> {
        let dims = self.i64s(dims)?;
        Ok(self.op("Reshape", "opset1", "special_zero=\"true\"", &[value, dims]))
    }

    pub(crate) fn matmul(&mut self, a: Port, b: Port, transpose_b: bool) -> Port {
        let data = format!("transpose_a=\"false\" transpose_b=\"{transpose_b}\"");
        self.op("MatMul", "opset1", &data, &[a, b])
    }

    pub(crate) fn concat(&mut self, values: &[Port], axis: i64) -> Port {
        self.op("Concat", "opset1", &format!("axis=\"{axis}\""), values)
    }

    /// Elements `begin .. end` of the last axis, every `step`th.
    pub(crate) fn slice(
        &mut self,
        value: Port,
        axis: i64,
        begin: i64,
        end: i64,
        step: i64,
    ) -> Result<Port> {
        let inputs = [
            value,
            self.i64s(&[begin])?,
            self.i64s(&[end])?,
            self.i64s(&[step])?,
            self.i64s(&[axis])?,
        ];
        Ok(self.op("Slice", "opset8", "", &inputs))
    }

    /// The text.
    pub(crate) fn xml(&self, title: &str) -> String {
        let title: String =
            title.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        format!(
            "<?xml version=\"1.0\"?><net name=\"{title}\" version=\"11\"><layers>{}</layers><edges>{}</edges></net>",
            self.layers, self.edges
        )
    }

    /// Memory for the constants; `None` if there are none.
    pub(crate) fn memory(&self) -> Result<Option<Tensor>> {
        if self.size == 0 {
            return Ok(None);
        }
        let size = usize::try_from(self.size)
            .map_err(|_| Error::invalid("constants of more than all memory"))?;
        Tensor::bytes(size).map(Some)
    }
}
