//! How numbers lie in a GGUF file (ggml, `ggml-common.h`).

/// How the numbers of a tensor lie: blocks of so many along its last axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufDtype {
    /// ggml's number of the type.
    pub id: u32,
    pub name: &'static str,
    /// Numbers of a block, and the bytes that it takes.
    pub block: usize,
    pub bytes: usize,
}

const fn dtype(id: u32, name: &'static str, block: usize, bytes: usize) -> GgufDtype {
    GgufDtype { id, name, block, bytes }
}

/// The types that are read.
pub(super) const DTYPES: [GgufDtype; 16] = [
    GgufDtype::F32,
    GgufDtype::F16,
    dtype(2, "Q4_0", 32, 18),
    dtype(3, "Q4_1", 32, 20),
    dtype(6, "Q5_0", 32, 22),
    dtype(7, "Q5_1", 32, 24),
    GgufDtype::Q8_0,
    dtype(10, "Q2_K", 256, 84),
    dtype(11, "Q3_K", 256, 110),
    dtype(12, "Q4_K", 256, 144),
    dtype(13, "Q5_K", 256, 176),
    dtype(14, "Q6_K", 256, 210),
    dtype(20, "IQ4_NL", 32, 18),
    dtype(23, "IQ4_XS", 256, 136),
    dtype(30, "BF16", 1, 2),
    dtype(39, "MXFP4", 32, 17),
];

/// The names of all types by their numbers, of which some are not read, and those at `-` have none.
pub(super) const NAMES: &str = "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS \
     IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 - - \
     MXFP4 NVFP4 Q1_0";

impl GgufDtype {
    pub const F32: Self = dtype(0, "F32", 1, 4);
    pub const F16: Self = dtype(1, "F16", 1, 2);
    pub const Q8_0: Self = dtype(8, "Q8_0", 32, 34);

    /// llama.cpp's number of a file most of whose matrices are of this type, of those that are written (`llama.h`, `llama_ftype`).
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            _ => 7,
        }
    }

    /// Whether several numbers share a scale.
    pub fn is_packed(self) -> bool {
        self.block > 1
    }
}
