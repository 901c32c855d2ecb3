//! What a new prompt takes over from those before it (SPEC 11.3).

use crate::error::{ensure, Outcome};
use crate::pages::{Pool, Table};
use crate::sha256::sha256;

/// The length of the common prefix.
pub fn common(a: &[i64], b: &[i64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// R prompts that lie one behind the other; each has a token at least.
pub fn split<'a>(tokens: &'a [i64], lengths: &[i64]) -> Outcome<Vec<&'a [i64]>> {
    let mut rest = tokens;
    let mut prompts = vec![];
    for length in lengths {
        let length = usize::try_from(*length).unwrap_or(0);
        ensure((1..=rest.len()).contains(&length), "lengths do not fit the tokens")?;
        let (prompt, others) = rest.split_at(length);
        prompts.push(prompt);
        rest = others;
    }
    Ok(prompts)
}

/// The chain from `h_0` on, 32 bytes each.
pub fn page_hashes(
    tokens: &[i64],
    page_size: usize,
    digest: &str,
    dtype: &str,
    salt: &str,
) -> Vec<u8> {
    let mut hash = sha256(["bitforbit", digest, dtype, salt].join("\0").as_bytes());
    let mut chain = hash.to_vec();
    for page in tokens.chunks_exact(page_size) {
        let mut message = hash.to_vec();
        message.extend(page.iter().flat_map(|token| (*token as u32).to_le_bytes()));
        hash = sha256(&message);
        chain.extend_from_slice(&hash);
    }
    chain
}

/// The operation `prefix_reuse` (SPEC 17): `cache_n` of each prompt, (R,), with so many pages.
///
/// A prompt that could not be held if it were alone is refused (SPEC 14.2); so room can be made for
/// every other.
pub fn prefix_reuse(prompts: &[&[i64]], page_size: usize, pages: usize) -> Outcome<Vec<i64>> {
    let mut pool = Pool::new(page_size)?;
    // The least recently used first.
    let mut kept: Vec<(&[i64], Table)> = vec![];
    let mut reused = vec![];
    for prompt in prompts {
        let alone = prompt.len().div_ceil(page_size);
        ensure(alone <= pages, format!("a prompt needs {alone} pages, and there are {pages}"))?;
        let shared = |(tokens, _): &(&[i64], Table)| common(tokens, prompt).min(prompt.len() - 1);
        // Of equally long prefixes the last one counts.
        let best =
            (0..kept.len()).max_by_key(|i| shared(&kept[*i])).filter(|i| shared(&kept[*i]) > 0);
        let (mut table, mut length) = (Table::default(), 0);
        if let Some(best) = best {
            let used = kept.remove(best);
            length = shared(&used);
            table = pool.fork(&used.1);
            pool.truncate(&mut table, length);
            kept.push(used);
        }
        reused.push(length as i64);
        let more = prompt.len() - length;
        while pool.used() + pool.needed(&table, more) > pages && !kept.is_empty() {
            pool.truncate(&mut kept.remove(0).1, 0);
        }
        pool.append(&mut table, more)?;
        for (tokens, table) in &mut kept {
            if prompt.starts_with(tokens) {
                pool.truncate(table, 0);
            }
        }
        kept.retain(|(tokens, _)| !prompt.starts_with(tokens));
        kept.push((prompt, table));
    }
    Ok(reused)
}
