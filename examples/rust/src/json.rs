//! JSON, as docs/protocol.md and a model's `config.json` need it.
//!
//! A number keeps its text, for integers reach 2^64 - 1 and floats are what their text denotes.

use crate::error::Outcome;

#[derive(Clone, Debug, PartialEq)]
pub enum Json {
    Null,
    Truth(bool),
    Number(String),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub fn number(value: impl ToString) -> Json {
        Json::Number(value.to_string())
    }

    pub fn as_float(&self) -> Option<f64> {
        match self {
            Json::Number(text) => text.parse().ok(),
            _ => None,
        }
    }

    /// An integer, also where it is written as a float (`1e4`).
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Json::Number(text) => text.parse().ok().or_else(|| {
                let float: f64 = text.parse().ok()?;
                (float.fract() == 0.0 && float.abs() < 9e15).then_some(float as i64)
            }),
            _ => None,
        }
    }

    pub fn as_unsigned(&self) -> Option<u64> {
        match self {
            Json::Number(text) => text.parse().ok(),
            _ => None,
        }
    }

    pub fn as_text(&self) -> Option<&str> {
        match self {
            Json::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_list(&self) -> Option<&[Json]> {
        match self {
            Json::List(items) => Some(items),
            _ => None,
        }
    }

    pub fn as_object(&self) -> Option<&[(String, Json)]> {
        match self {
            Json::Object(members) => Some(members),
            _ => None,
        }
    }

    /// The member of an object; null is as good as absent.
    pub fn get(&self, key: &str) -> Option<&Json> {
        let members = self.as_object()?;
        let (_, value) = members.iter().find(|(name, _)| name == key)?;
        (*value != Json::Null).then_some(value)
    }

    pub fn float(&self, key: &str) -> Option<f64> {
        self.get(key)?.as_float()
    }

    pub fn int(&self, key: &str) -> Option<i64> {
        self.get(key)?.as_int()
    }

    /// A count: an integer that is not negative.
    pub fn size(&self, key: &str) -> Option<usize> {
        self.int(key)?.try_into().ok()
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.get(key)?.as_text()
    }

    pub fn truth(&self, key: &str) -> Option<bool> {
        match self.get(key)? {
            Json::Truth(truth) => Some(*truth),
            _ => None,
        }
    }

    pub fn list(&self, key: &str) -> Option<&[Json]> {
        self.get(key)?.as_list()
    }
}

/// The value that a text denotes; the text is refused where it holds more, or none.
pub fn parse(text: &[u8]) -> Outcome<Json> {
    let mut parser = Parser { text, at: 0, depth: 0 };
    let value = parser.value()?;
    parser.skip_spaces();
    if parser.at < text.len() {
        return parser.refuse("nothing more");
    }
    Ok(value)
}

/// Lists and objects deeper than this are refused, for the parser calls itself.
const DEEPEST: usize = 100;

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn refuse<T>(&self, expected: &str) -> Outcome<T> {
        Err(format!("JSON: {expected} expected at byte {}", self.at))
    }

    fn peek(&self) -> u8 {
        self.text.get(self.at).copied().unwrap_or(0)
    }

    fn next(&mut self) -> u8 {
        let byte = self.peek();
        self.at += 1;
        byte
    }

    /// Whether the byte is next; it is then taken.
    fn take(&mut self, byte: u8) -> bool {
        let there = self.at < self.text.len() && self.peek() == byte;
        self.at += there as usize;
        there
    }

    fn skip_spaces(&mut self) {
        while b" \t\r\n".contains(&self.peek()) {
            self.at += 1;
        }
    }

    fn value(&mut self) -> Outcome<Json> {
        self.skip_spaces();
        match self.peek() {
            b'{' => self.nested(Self::object),
            b'[' => self.nested(Self::list),
            b'"' => Ok(Json::Text(self.string()?)),
            _ => self.word(),
        }
    }

    fn nested(&mut self, read: fn(&mut Self) -> Outcome<Json>) -> Outcome<Json> {
        self.at += 1;
        self.depth += 1;
        if self.depth > DEEPEST {
            return self.refuse("less depth");
        }
        let value = read(self)?;
        self.depth -= 1;
        Ok(value)
    }

    fn object(&mut self) -> Outcome<Json> {
        let mut members = vec![];
        self.skip_spaces();
        if self.take(b'}') {
            return Ok(Json::Object(members));
        }
        loop {
            self.skip_spaces();
            let key = self.string()?;
            self.skip_spaces();
            if !self.take(b':') {
                return self.refuse("a colon");
            }
            members.push((key, self.value()?));
            self.skip_spaces();
            if self.take(b'}') {
                return Ok(Json::Object(members));
            }
            if !self.take(b',') {
                return self.refuse("a comma or brace");
            }
        }
    }

    fn list(&mut self) -> Outcome<Json> {
        let mut items = vec![];
        self.skip_spaces();
        if self.take(b']') {
            return Ok(Json::List(items));
        }
        loop {
            items.push(self.value()?);
            self.skip_spaces();
            if self.take(b']') {
                return Ok(Json::List(items));
            }
            if !self.take(b',') {
                return self.refuse("a comma or bracket");
            }
        }
    }

    /// A number, `true`, `false` or `null`.
    fn word(&mut self) -> Outcome<Json> {
        let rest = &self.text[self.at.min(self.text.len())..];
        let length =
            rest.iter().take_while(|byte| b"+-.".contains(byte) || byte.is_ascii_alphanumeric());
        let word = std::str::from_utf8(&rest[..length.count()]).unwrap_or("");
        let value = match word {
            "null" => Json::Null,
            "true" => Json::Truth(true),
            "false" => Json::Truth(false),
            _ if word.parse().is_ok_and(f64::is_finite) => Json::number(word),
            _ => return self.refuse("a value"),
        };
        self.at += word.len();
        Ok(value)
    }

    fn string(&mut self) -> Outcome<String> {
        if !self.take(b'"') {
            return self.refuse("a string");
        }
        let mut bytes = vec![];
        while self.at < self.text.len() {
            match self.next() {
                b'"' => return String::from_utf8(bytes).or_else(|_| self.refuse("UTF-8")),
                b'\\' => {
                    let character = self.escaped()?;
                    bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                }
                byte => bytes.push(byte),
            }
        }
        self.refuse("the end of a string")
    }

    fn escaped(&mut self) -> Outcome<char> {
        Ok(match self.next() {
            b'n' => '\n',
            b't' => '\t',
            b'r' => '\r',
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'u' => self.unicode()?,
            other @ (b'"' | b'\\' | b'/') => other as char,
            _ => return self.refuse("an escape"),
        })
    }

    /// The character of `\uXXXX`, or of two of them that are a surrogate pair.
    fn unicode(&mut self) -> Outcome<char> {
        let mut code = self.hexadecimal()?;
        if (0xd800..0xdc00).contains(&code) && self.take(b'\\') && self.take(b'u') {
            let low = self.hexadecimal()?;
            code = 0x10000 + ((code - 0xd800) << 10) + low.wrapping_sub(0xdc00);
        }
        char::from_u32(code).map_or_else(|| self.refuse("a character"), Ok)
    }

    fn hexadecimal(&mut self) -> Outcome<u32> {
        let digits = self.text.get(self.at..self.at + 4).unwrap_or(b"");
        let text = std::str::from_utf8(digits).unwrap_or("");
        self.at += 4;
        u32::from_str_radix(text, 16).or_else(|_| self.refuse("four hexadecimal digits"))
    }
}

/// The text as a JSON string.
pub fn quote(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\0'..='\x1f' => quoted.push_str(&format!("\\u{:04x}", character as u32)),
            _ => quoted.push(character),
        }
    }
    quoted.push('"');
    quoted
}
