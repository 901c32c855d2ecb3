//! What a call is refused with: one line that says why (docs/protocol.md, "Answers").

pub type Outcome<T> = Result<T, String>;

/// Refuses with the message unless the condition holds.
pub fn ensure(holds: bool, message: impl Into<String>) -> Outcome<()> {
    if holds {
        Ok(())
    } else {
        Err(message.into())
    }
}
