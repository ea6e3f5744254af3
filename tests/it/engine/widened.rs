//! Copies of the tests' model with 32-bit weights, whose results do not depend on the size of a batch.

use super::super::harness::folder;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use thunder::model::Model;
use thunder::model::llama::ModelOptions;

/// Reader of a GGUF file's header.
struct Header<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Header<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        self.at += count;
        &self.bytes[self.at - count..self.at]
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn text(&mut self) -> &'a [u8] {
        let length = self.u64() as usize;
        self.take(length)
    }

    fn skip_value(&mut self, kind: u32) {
        match kind {
            0 | 1 | 7 => drop(self.take(1)),
            2 | 3 => drop(self.take(2)),
            4..=6 => drop(self.take(4)),
            10..=12 => drop(self.take(8)),
            8 => drop(self.text()),
            9 => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).for_each(|_| self.skip_value(kind));
            }
            other => panic!("unknown type {other}"),
        }
    }
}

/// Returns the number with the bits of a 16-bit float.
fn from_f16(bits: u16) -> f32 {
    let (sign, exponent, fraction) = (bits >> 15, i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    let value =
        if exponent == 0 { fraction * (-24f32).exp2() } else { (1024.0 + fraction) * (exponent as f32 - 25.0).exp2() };
    if sign == 1 { -value } else { value }
}

/// Writes a copy of the tests' model with 32-bit weights, to each of which noise of this relative size is added.
fn write(noise: f32) -> PathBuf {
    let file = std::fs::read(super::super::harness::model()).unwrap();
    let mut header = Header { bytes: &file, at: 8 };
    let (tensors, pairs) = (header.u64(), header.u64());
    for _ in 0..pairs {
        header.text();
        let kind = header.u32();
        header.skip_value(kind);
    }
    let mut copy = file[..header.at].to_vec();
    let mut infos = Vec::new();
    for _ in 0..tensors {
        let start = header.at;
        header.text();
        let dimensions = header.u32();
        let count: u64 = (0..dimensions).map(|_| header.u64()).product();
        infos.push((&file[start..header.at], count as usize, header.u32(), header.u64() as usize));
    }
    let data = header.at.next_multiple_of(32);
    let mut random = StdRng::seed_from_u64(3);
    let mut values = Vec::new();
    for (name, count, kind, offset) in infos {
        copy.extend(name);
        copy.extend(0_u32.to_le_bytes());
        copy.extend((values.len() as u64).to_le_bytes());
        let number = |index: usize| {
            let at = data + offset + index * if kind == 0 { 4 } else { 2 };
            match kind {
                0 => f32::from_le_bytes(file[at..at + 4].try_into().unwrap()),
                1 => from_f16(u16::from_le_bytes(file[at..at + 2].try_into().unwrap())),
                other => panic!("unknown tensor type {other}"),
            }
        };
        for index in 0..count {
            values.extend((number(index) * (1.0 + noise * random.random_range(-1.0..1.0_f32))).to_le_bytes());
        }
        values.resize(values.len().next_multiple_of(32), 0);
    }
    copy.resize(copy.len().next_multiple_of(32), 0);
    copy.extend(values);
    let path = folder().join(format!("widened-{noise}.gguf"));
    std::fs::write(&path, copy).unwrap();
    path
}

/// Loads a copy of the tests' model with 32-bit weights, to each of which noise of this relative size is added.
pub fn widened(noise: f32) -> Arc<Model> {
    load(&write(noise))
}

/// Loads a model.
pub fn load(path: &Path) -> Arc<Model> {
    let options = ModelOptions { no_mmap: true, ..ModelOptions::default() };
    Arc::new(Model::load(path, &options, |_| true).unwrap())
}
