//! The constants of rotary embedding, rounded to float32 once (SPEC 7.1 and 7.2).

use crate::double_double::{DoubleDouble, ONE, PI};
use crate::error::{ensure, Outcome};
use crate::json::Json;

/// The parameters of SPEC 7.2, all of which are there.
pub struct Rope {
    kind: Kind,
    /// d, the elements of a head that rotate: even.
    pub dimension: usize,
    theta: f64,
}

enum Kind {
    Default,
    Linear { factor: f64 },
    Dynamic { factor: f64, original: f64 },
    Llama3 { factor: f64, low: f64, high: f64, original: f64 },
    Yarn(Yarn),
    Longrope { original: f64, short: Vec<f64>, long: Vec<f64>, attention_factor: DoubleDouble },
}

struct Yarn {
    factor: f64,
    original: f64,
    beta_fast: f64,
    beta_slow: f64,
    truncate: bool,
    attention_factor: DoubleDouble,
}

/// A real number of few decimals, such as 0.1, which no float64 is.
fn ratio(numerator: f64, denominator: f64) -> DoubleDouble {
    DoubleDouble::from(numerator) / denominator.into()
}

fn needed(parameters: &Json, key: &str) -> Outcome<f64> {
    parameters.float(key).ok_or(format!("rope has no {key}"))
}

impl Rope {
    /// Reads a dictionary of SPEC 7.2; `context` is `max_position_embeddings`, where there is one.
    pub fn new(parameters: &Json, head_dim: usize, context: Option<f64>) -> Outcome<Rope> {
        let partial = parameters.float("partial_rotary_factor").unwrap_or(1.0);
        let dimension = (head_dim as f64 * partial) as usize;
        let even =
            dimension > 0 && dimension.is_multiple_of(2) && dimension <= head_dim.min(1 << 16);
        ensure(even, "the rotary dimension must be even and positive")?;
        let theta = needed(parameters, "rope_theta")?;
        ensure(theta > 1.0, "rope_theta must be above 1")?;
        let name = parameters.text("rope_type").or(parameters.text("type")).unwrap_or("default");
        let kind = Kind::new(name, parameters, dimension, context)?;
        Ok(Rope { kind, dimension, theta })
    }

    /// Whether a token's constants depend on its position.
    pub fn by_position(&self) -> bool {
        matches!(self.kind, Kind::Dynamic { .. } | Kind::Longrope { .. })
    }

    /// `inv_freq` (d/2,), and the factor of cos and sin, for the token at the position.
    pub fn constants(&self, position: i64) -> (Vec<f32>, f32) {
        let theta_logarithm = self.theta_at(position).ln();
        let d = DoubleDouble::from(self.dimension as f64);
        let frequency = |i: usize| match i {
            0 => ONE,
            _ => (theta_logarithm * (-2.0 * i as f64) / d).exp(),
        };
        let scaled: Box<dyn Fn(usize) -> DoubleDouble> = match &self.kind {
            Kind::Default | Kind::Dynamic { .. } => Box::new(frequency),
            Kind::Linear { factor } => Box::new(move |i| frequency(i) / (*factor).into()),
            Kind::Llama3 { factor, low, high, original } => {
                Box::new(move |i| llama3(frequency(i), *factor, *low, *high, *original))
            }
            Kind::Yarn(yarn) => {
                let (low, high) = yarn.ramp(d, theta_logarithm);
                Box::new(move |i| yarn.scaled(frequency(i), i, low, high))
            }
            Kind::Longrope { original, short, long, .. } => {
                let factors = if (position as f64) < *original { short } else { long };
                Box::new(move |i| frequency(i) / factors[i].into())
            }
        };
        let constants = (0..self.dimension / 2).map(|i| scaled(i).to_f32()).collect();
        (constants, self.attention_factor().to_f32())
    }

    fn attention_factor(&self) -> DoubleDouble {
        match &self.kind {
            Kind::Yarn(yarn) => yarn.attention_factor,
            Kind::Longrope { attention_factor, .. } => *attention_factor,
            _ => ONE,
        }
    }

    /// theta, which `dynamic` replaces beyond the original length.
    fn theta_at(&self, position: i64) -> DoubleDouble {
        let (theta, d) =
            (DoubleDouble::from(self.theta), DoubleDouble::from(self.dimension as f64));
        match self.kind {
            Kind::Dynamic { factor, original } if (position + 1) as f64 > original => {
                let n = (position + 1) as f64;
                let factor = DoubleDouble::from(factor);
                let base = factor * n / original.into() - (factor - ONE);
                theta * base.pow(d / (d - 2.0.into()))
            }
            _ => theta,
        }
    }
}

impl Kind {
    fn new(name: &str, parameters: &Json, dimension: usize, context: Option<f64>) -> Outcome<Kind> {
        let factor = || needed(parameters, "factor");
        let original = || needed(parameters, "original_max_position_embeddings");
        Ok(match name {
            "default" => Kind::Default,
            "linear" => Kind::Linear { factor: factor()? },
            "dynamic" => {
                ensure(dimension > 2, "dynamic rope needs a rotary dimension above 2")?;
                Kind::Dynamic {
                    factor: factor()?,
                    original: original().or(context.ok_or("rope has no context"))?,
                }
            }
            "llama3" => Kind::Llama3 {
                factor: factor()?,
                low: needed(parameters, "low_freq_factor")?,
                high: needed(parameters, "high_freq_factor")?,
                original: original()?,
            },
            "yarn" => Kind::Yarn(Yarn::new(parameters)?),
            "longrope" => longrope(parameters, dimension, context)?,
            _ => return Err(format!("rope_type {name} is unknown")),
        })
    }
}

/// One frequency of `llama3`.
fn llama3(f: DoubleDouble, factor: f64, low: f64, high: f64, original: f64) -> DoubleDouble {
    let (low, high, original) = (low.into(), high.into(), DoubleDouble::from(original));
    let wavelength = PI * 2.0 / f;
    if wavelength > original / low {
        f / factor.into()
    } else if wavelength < original / high {
        f
    } else {
        let s = (original / wavelength - low) / (high - low);
        (ONE - s) * f / factor.into() + s * f
    }
}

impl Yarn {
    fn new(parameters: &Json) -> Outcome<Yarn> {
        let factor = needed(parameters, "factor")?;
        let g = |x: f64| match factor {
            ..=1.0 => ONE,
            _ => ratio(1.0, 10.0) * x * DoubleDouble::from(factor).ln() + ONE,
        };
        let given = |key: &str| parameters.float(key).filter(|value| *value != 0.0);
        let attention_factor = match parameters.float("attention_factor") {
            Some(factor) => factor.into(),
            None => match (given("mscale"), given("mscale_all_dim")) {
                (Some(scale), Some(all)) => g(scale) / g(all),
                _ => g(1.0),
            },
        };
        Ok(Yarn {
            factor,
            original: needed(parameters, "original_max_position_embeddings")?,
            beta_fast: parameters.float("beta_fast").unwrap_or(32.0),
            beta_slow: parameters.float("beta_slow").unwrap_or(1.0),
            truncate: parameters.truth("truncate").unwrap_or(true),
            attention_factor,
        })
    }

    /// low and high of SPEC 7.2.
    fn ramp(&self, d: DoubleDouble, theta_logarithm: DoubleDouble) -> (DoubleDouble, DoubleDouble) {
        let c = |beta: f64| {
            let turns = DoubleDouble::from(self.original) / (PI * 2.0 * beta);
            d * turns.ln() / (theta_logarithm * 2.0)
        };
        let (mut low, mut high) = (c(self.beta_fast), c(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor().into(), high.ceil().into());
        }
        if low.high < 0.0 {
            low = 0.0.into();
        }
        if high > d - ONE {
            high = d - ONE;
        }
        if high == low {
            high = high + ratio(1.0, 1000.0);
        }
        (low, high)
    }

    fn scaled(
        &self,
        f: DoubleDouble,
        i: usize,
        low: DoubleDouble,
        high: DoubleDouble,
    ) -> DoubleDouble {
        let ramp = (DoubleDouble::from(i as f64) - low) / (high - low);
        let clamped = if ramp.high < 0.0 {
            0.0.into()
        } else if ramp > ONE {
            ONE
        } else {
            ramp
        };
        let e = ONE - clamped;
        f / self.factor.into() * (ONE - e) + f * e
    }
}

fn longrope(parameters: &Json, dimension: usize, context: Option<f64>) -> Outcome<Kind> {
    let factors = |key: &str| -> Outcome<Vec<f64>> {
        let list = parameters.list(key).ok_or(format!("longrope has no {key}"))?;
        let numbers = list.iter().map(Json::as_float).collect::<Option<Vec<_>>>();
        let fit = numbers.filter(|numbers| numbers.len() == dimension / 2);
        fit.ok_or(format!("{key} must be {} numbers", dimension / 2))
    };
    let original = needed(parameters, "original_max_position_embeddings")?;
    let attention_factor = match parameters.float("attention_factor") {
        Some(factor) => factor.into(),
        None => {
            let extension = context.map(|context| context / original);
            let factor =
                parameters.float("factor").or(extension).ok_or("longrope has no factor")?;
            match factor {
                ..=1.0 => ONE,
                _ => (ONE + DoubleDouble::from(factor).ln() / DoubleDouble::from(original).ln())
                    .sqrt(),
            }
        }
    };
    let (short, long) = (factors("short_factor")?, factors("long_factor")?);
    Ok(Kind::Longrope { original, short, long, attention_factor })
}
