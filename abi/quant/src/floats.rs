//! Plain element types to f32: exact where f32 can hold the value, else rounded to nearest, ties to even.
//!
//! bfloat16 is the upper half of a binary32, so the shift is exact for every pattern, NaN payloads included.

use crate::bytes::{each_block, f16_to_f32};

pub(crate) fn f32(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; 4], [out]| *out = f32::from_bits(u32::from_le_bytes(*b)));
}

pub(crate) fn f64(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; 8], [out]| *out = f64::from_le_bytes(*b) as f32);
}

pub(crate) fn f16(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; 2], [out]| *out = f16_to_f32(u16::from_le_bytes(*b)));
}

pub(crate) fn bf16(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; 2], [out]| {
        *out = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
    });
}

pub(crate) fn i8(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; 1], [out]| *out = f32::from(i8::from_le_bytes(*b)));
}

pub(crate) fn i16(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; 2], [out]| *out = f32::from(i16::from_le_bytes(*b)));
}

pub(crate) fn i32(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; 4], [out]| *out = i32::from_le_bytes(*b) as f32);
}

pub(crate) fn i64(src: &[u8], dst: &mut [f32]) {
    each_block(src, dst, |b: &[u8; 8], [out]| *out = i64::from_le_bytes(*b) as f32);
}
