//! A writer of minimal GGUF files for small models.

/// A file to which metadata is written first, and then tensors.
#[derive(Default)]
pub struct Writer {
    bytes: Vec<u8>,
    pairs: u64,
}

impl Writer {
    fn text(bytes: &mut Vec<u8>, text: &str) {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.as_bytes());
    }

    fn key(&mut self, name: &str, kind: u32) {
        Self::text(&mut self.bytes, name);
        self.bytes.extend(kind.to_le_bytes());
        self.pairs += 1;
    }

    pub fn number(&mut self, name: &str, value: u32) {
        self.key(name, 4);
        self.bytes.extend(value.to_le_bytes());
    }

    pub fn float(&mut self, name: &str, value: f32) {
        self.key(name, 6);
        self.bytes.extend(value.to_le_bytes());
    }

    pub fn string(&mut self, name: &str, value: &str) {
        self.key(name, 8);
        Self::text(&mut self.bytes, value);
    }

    /// Writes a value of the type `u32`, `f32`, `bool` or `u64`.
    pub fn value(&mut self, name: &str, kind: &str, bytes: &[u8]) {
        self.key(name, Self::type_number(kind));
        self.bytes.extend(bytes);
    }

    /// Writes a list of values of one of these types.
    pub fn values(&mut self, name: &str, kind: &str, count: usize, bytes: &[u8]) {
        self.list(name, Self::type_number(kind), count, bytes);
    }

    fn type_number(kind: &str) -> u32 {
        ["", "", "", "", "u32", "", "f32", "bool", "", "", "u64"].iter().position(|name| *name == kind).unwrap() as u32
    }

    fn list(&mut self, name: &str, kind: u32, count: usize, values: &[u8]) {
        self.key(name, 9);
        self.bytes.extend(kind.to_le_bytes());
        self.bytes.extend((count as u64).to_le_bytes());
        self.bytes.extend(values);
    }

    pub fn numbers(&mut self, name: &str, values: impl Iterator<Item = i32>) {
        let bytes: Vec<u8> = values.flat_map(i32::to_le_bytes).collect();
        self.list(name, 5, bytes.len() / size_of::<i32>(), &bytes);
    }

    pub fn strings(&mut self, name: &str, values: &[String]) {
        let mut bytes = Vec::new();
        values.iter().for_each(|value| Self::text(&mut bytes, value));
        self.list(name, 8, values.len(), &bytes);
    }

    /// Returns the file with these tensors of 32-bit floats: name, dimensions with the innermost first, values.
    pub fn with_tensors<'a>(self, tensors: &[(&'a str, Vec<usize>, &'a [f32])]) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend((tensors.len() as u64).to_le_bytes());
        file.extend(self.pairs.to_le_bytes());
        file.extend(&self.bytes);
        let (mut offset, mut data) = (0_u64, Vec::new());
        for (name, dimensions, values) in tensors {
            Self::text(&mut file, name);
            assert_eq!(dimensions.iter().product::<usize>(), values.len(), "{name}");
            file.extend((dimensions.len() as u32).to_le_bytes());
            dimensions.iter().for_each(|&dimension| file.extend((dimension as u64).to_le_bytes()));
            file.extend(0_u32.to_le_bytes());
            file.extend(offset.to_le_bytes());
            // The supported processors are little-endian, like the format.
            data.extend_from_slice(bytemuck::cast_slice(values));
            data.resize(data.len().next_multiple_of(32), 0);
            offset = data.len() as u64;
        }
        file.resize(file.len().next_multiple_of(32), 0);
        file.extend(data);
        file
    }
}
