//! What tells families apart (SPEC 10.3), a row for each of them.

/// Where a layer has norms (SPEC 10.2).
#[derive(Clone, Copy, PartialEq)]
pub enum Norms {
    Before,
    After,
    Around,
}

/// How q and k are normed (SPEC 10.2).
#[derive(Clone, Copy, PartialEq)]
pub enum HeadNorm {
    None,
    Head,
    Row,
}

/// Which layers have a window, where `layer_types` does not say so.
#[derive(Clone, Copy, PartialEq)]
pub enum Windows {
    None,
    Every,
    /// As `layer_types` names them, which must be there.
    Named,
    /// All but each n-th.
    AllBut(usize),
    /// All but each `sliding_window_pattern`-th.
    Pattern,
    /// From layer `max_window_layers` on.
    FromLayer,
}

/// Which layers have experts.
#[derive(Clone, Copy, PartialEq)]
pub enum Sparse {
    None,
    All,
    Stepped,
    Named,
}

#[derive(Clone, Copy)]
pub struct Family {
    pub architecture: &'static str,
    pub norms: Norms,
    pub head_norm: HeadNorm,
    pub windows: Windows,
    /// Windows are there only where `use_sliding_window` is.
    pub switched: bool,
    pub rope_by_type: bool,
    pub sparse: Sparse,
    /// Of experts: renormalised gates, where the configuration does not say.
    pub renormalise: Option<bool>,
    /// Norms are stored as `w - 1`, embeddings are scaled, attention has a scale of its own.
    pub gemma: bool,
    pub tied: bool,
}

const PLAIN: Family = Family {
    architecture: "LlamaForCausalLM",
    norms: Norms::Before,
    head_norm: HeadNorm::None,
    windows: Windows::None,
    switched: false,
    rope_by_type: false,
    sparse: Sparse::None,
    renormalise: None,
    gemma: false,
    tied: false,
};

pub const FAMILIES: &[Family] = &[
    PLAIN,
    Family { architecture: "MistralForCausalLM", windows: Windows::Every, ..PLAIN },
    Family {
        architecture: "MixtralForCausalLM",
        windows: Windows::Every,
        sparse: Sparse::All,
        renormalise: Some(true),
        ..PLAIN
    },
    Family {
        architecture: "Qwen2ForCausalLM",
        windows: Windows::FromLayer,
        switched: true,
        ..PLAIN
    },
    Family {
        architecture: "Qwen2MoeForCausalLM",
        windows: Windows::Named,
        switched: true,
        sparse: Sparse::Stepped,
        ..PLAIN
    },
    Family {
        architecture: "Qwen3ForCausalLM",
        head_norm: HeadNorm::Head,
        windows: Windows::FromLayer,
        switched: true,
        ..PLAIN
    },
    Family {
        architecture: "Qwen3MoeForCausalLM",
        head_norm: HeadNorm::Head,
        windows: Windows::Every,
        switched: true,
        sparse: Sparse::Stepped,
        ..PLAIN
    },
    Family {
        architecture: "MellumForCausalLM",
        head_norm: HeadNorm::Head,
        windows: Windows::Named,
        rope_by_type: true,
        sparse: Sparse::Named,
        ..PLAIN
    },
    Family {
        architecture: "OlmoeForCausalLM",
        head_norm: HeadNorm::Row,
        sparse: Sparse::All,
        ..PLAIN
    },
    Family {
        architecture: "Olmo2ForCausalLM",
        norms: Norms::After,
        head_norm: HeadNorm::Row,
        ..PLAIN
    },
    Family {
        architecture: "Olmo3ForCausalLM",
        norms: Norms::After,
        head_norm: HeadNorm::Row,
        windows: Windows::AllBut(4),
        rope_by_type: true,
        ..PLAIN
    },
    Family {
        architecture: "Gemma2ForCausalLM",
        norms: Norms::Around,
        windows: Windows::AllBut(2),
        gemma: true,
        tied: true,
        ..PLAIN
    },
    Family {
        architecture: "Gemma3ForCausalLM",
        norms: Norms::Around,
        head_norm: HeadNorm::Head,
        windows: Windows::Pattern,
        rope_by_type: true,
        gemma: true,
        tied: true,
        ..PLAIN
    },
    Family {
        architecture: "SmolLM3ForCausalLM",
        windows: Windows::Named,
        switched: true,
        tied: true,
        ..PLAIN
    },
    Family { architecture: "Phi3ForCausalLM", windows: Windows::Every, ..PLAIN },
    Family {
        architecture: "GptOssForCausalLM",
        windows: Windows::AllBut(2),
        sparse: Sparse::All,
        renormalise: Some(false),
        ..PLAIN
    },
];
