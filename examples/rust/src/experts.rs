//! Routing, and the experts that compute a token (SPEC 9.2 and 9.3).

use std::cmp::Ordering;

use crate::bits::NAN;
use crate::elementary::{sigmoid, softmax};
use crate::error::{ensure, Outcome};
use crate::feed_forward::GatedMlp;
use crate::linear::Linear;

#[derive(Clone, Copy, PartialEq)]
pub enum Score {
    Softmax,
    Sigmoid,
    Logits,
}

impl Score {
    pub fn named(name: &str) -> Outcome<Score> {
        match name {
            "softmax" => Ok(Score::Softmax),
            "sigmoid" => Ok(Score::Sigmoid),
            "logits" => Ok(Score::Logits),
            _ => Err(format!("score {name} is unknown")),
        }
    }
}

/// How a family routes: the parameters of SPEC 9.2.
pub struct Router {
    pub experts: usize,
    pub top_k: usize,
    pub score: Score,
    /// (E,)
    pub selection_bias: Option<Vec<f32>>,
    pub groups: usize,
    pub kept_groups: usize,
    pub group_best: usize,
    pub renormalise: bool,
    pub epsilon: f64,
    pub scale: f32,
}

/// One token's experts in rank order, and their gates: (k,) each.
pub struct Routing {
    pub experts: Vec<usize>,
    pub gates: Vec<f32>,
}

/// The order of ranks, the largest first; a stable sort leaves equal ones by index.
fn descending(a: f32, b: f32) -> Ordering {
    b.partial_cmp(&a).unwrap_or(Ordering::Equal)
}

impl Router {
    /// The plain router of most families.
    pub fn new(experts: usize, top_k: usize, score: Score) -> Router {
        Router {
            experts,
            top_k,
            score,
            selection_bias: None,
            groups: 1,
            kept_groups: 1,
            group_best: 1,
            renormalise: false,
            epsilon: 0.0,
            scale: 1.0,
        }
    }

    /// Refuses what cannot choose `top_k` experts.
    pub fn check(&self) -> Outcome<()> {
        let whole = self.groups > 0 && self.experts.is_multiple_of(self.groups);
        ensure(whole, "the experts do not divide into groups")?;
        ensure((1..=self.groups).contains(&self.kept_groups), "kept_groups does not fit")?;
        let candidates = self.experts / self.groups * self.kept_groups;
        ensure((1..=candidates).contains(&self.top_k), "top_k does not fit the experts")?;
        let bias = self.selection_bias.as_ref();
        let fits = bias
            .is_none_or(|bias| bias.len() == self.experts && bias.iter().all(|b| b.is_finite()));
        ensure(fits, "selection_bias must be a finite number for each expert")
    }

    /// Steps 1 to 7 of SPEC 9.2 for one row of logits (E,).
    pub fn route(&self, logits: &[f32]) -> Routing {
        let unfit = logits.iter().any(|l| l.is_nan() || *l == f32::INFINITY);
        if unfit || logits.iter().all(|l| *l == f32::NEG_INFINITY) {
            return Routing { experts: (0..self.top_k).collect(), gates: vec![NAN; self.top_k] };
        }
        let scores = match self.score {
            Score::Softmax => softmax(logits),
            Score::Sigmoid => logits.iter().map(|l| sigmoid(*l)).collect(),
            Score::Logits => logits.to_vec(),
        };
        let selection = self.selection(logits, &scores);
        let mut experts = self.candidates(&selection);
        experts.sort_by(|a, b| descending(selection[*a], selection[*b]));
        experts.truncate(self.top_k);
        let chosen = experts.iter().map(|e| scores[*e]).collect();
        Routing { experts, gates: self.gates(chosen) }
    }

    /// Step 2: c.
    fn selection(&self, logits: &[f32], scores: &[f32]) -> Vec<f32> {
        let mut selection = scores.to_vec();
        if let Some(bias) = &self.selection_bias {
            selection.iter_mut().zip(bias).for_each(|(c, bias)| *c += bias);
        }
        for (c, logit) in selection.iter_mut().zip(logits) {
            if *logit == f32::NEG_INFINITY {
                *c = f32::NEG_INFINITY;
            }
        }
        selection
    }

    /// Step 3: the experts of the best groups, by index.
    fn candidates(&self, selection: &[f32]) -> Vec<usize> {
        let size = self.experts / self.groups;
        let group_score = |group: &[f32]| {
            let mut ranked = group.to_vec();
            ranked.sort_by(|a, b| descending(*a, *b));
            ranked[1..]
                .iter()
                .take(self.group_best.saturating_sub(1))
                .fold(ranked[0], |sum, c| sum + c)
        };
        let group_scores: Vec<f32> = selection.chunks(size).map(group_score).collect();
        let mut groups: Vec<usize> = (0..self.groups).collect();
        groups.sort_by(|a, b| descending(group_scores[*a], group_scores[*b]));
        let kept = &groups[..self.kept_groups];
        (0..self.experts).filter(|expert| kept.contains(&(expert / size))).collect()
    }

    /// Steps 5 to 7, of the scores of the chosen in rank order.
    fn gates(&self, chosen: Vec<f32>) -> Vec<f32> {
        let mut gates = if self.score == Score::Logits { softmax(&chosen) } else { chosen };
        if self.renormalise {
            let sum = gates.iter().fold(0.0, |sum, g| sum + f64::from(*g)) + self.epsilon;
            gates.iter_mut().for_each(|g| *g = (f64::from(*g) / sum) as f32);
        }
        gates.iter_mut().for_each(|g| *g *= self.scale);
        gates
    }
}

/// The expert that computes every token, and its gate where it has one.
pub struct SharedExpert {
    pub mlp: GatedMlp,
    pub gate: Option<Linear>,
}

/// x (T, K) through the experts of its routings, result (T, K) (SPEC 9.3).
///
/// Each expert computes all of its tokens at once; sums are in rank order all the same.
pub fn mix(
    x: &[f32],
    routings: &[Routing],
    experts: &[GatedMlp],
    shared: Option<&SharedExpert>,
) -> Vec<f32> {
    let (rows, ranks) =
        (routings.len(), routings.first().map_or(0, |routing| routing.experts.len()));
    let width = x.len() / rows.max(1);
    let mut results = vec![0.0; rows * ranks * width];
    for (expert, mlp) in experts.iter().enumerate() {
        let chosen = |(token, routing): (usize, &Routing)| -> Vec<(usize, usize)> {
            let ranked = routing.experts.iter().enumerate().filter(|(_, e)| **e == expert);
            ranked.map(|(rank, _)| (token, rank)).collect()
        };
        let places: Vec<(usize, usize)> = routings.iter().enumerate().flat_map(chosen).collect();
        let gathered: Vec<f32> = places
            .iter()
            .flat_map(|(token, _)| x[token * width..][..width].iter().copied())
            .collect();
        let y = mlp.apply(&gathered, places.len());
        for ((token, rank), y) in places.iter().zip(y.chunks(width)) {
            results[(token * ranks + rank) * width..][..width].copy_from_slice(y);
        }
    }
    let mut sums = vec![0.0; x.len()];
    for (token, routing) in routings.iter().enumerate() {
        let sum = &mut sums[token * width..][..width];
        for (rank, gate) in routing.gates.iter().enumerate() {
            let y = &results[(token * ranks + rank) * width..][..width];
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += gate * y);
        }
    }
    if let Some(shared) = shared {
        shared.add(x, rows, &mut sums);
    }
    sums
}

impl SharedExpert {
    /// Adds its result of x (T, K) to the sums (T, K), last.
    fn add(&self, x: &[f32], rows: usize, sums: &mut [f32]) {
        let y = self.mlp.apply(x, rows);
        let gates = self.gate.as_ref().map(|gate| gate.apply(x, rows));
        let width = x.len() / rows.max(1);
        for (i, (sum, y)) in sums.iter_mut().zip(y).enumerate() {
            *sum += gates.as_ref().map_or(y, |gates| sigmoid(gates[i / width]) * y);
        }
    }
}
