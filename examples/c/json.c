/* A recursive-descent reader of JSON (RFC 8259). */

#include "json.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { MAX_DEPTH = 16 };

typedef struct {
    const char *at, *end;
    JsonMemory *take;
    void *owner;
    int depth;
} Reader;

static Json *read_value(Reader *reader);

static void skip_space(Reader *reader) {
    while (reader->at < reader->end && memchr(" \t\r\n", *reader->at, 4))
        reader->at++;
}

/* Whether the next character, after space, is this one; if so it is passed. */
static bool take_character(Reader *reader, char wanted) {
    skip_space(reader);
    if (reader->at == reader->end || *reader->at != wanted)
        return false;
    reader->at++;
    return true;
}

static bool take_word(Reader *reader, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(reader->end - reader->at) < length || memcmp(reader->at, word, length) != 0)
        return false;
    reader->at += length;
    return true;
}

/* Four hexadecimal digits, or -1. */
static int32_t read_hex(Reader *reader) {
    static const char digits[] = "0123456789abcdefABCDEF";
    int32_t value = 0;
    for (int i = 0; i < 4; i++) {
        if (reader->at == reader->end || *reader->at == '\0')
            return -1;
        const char *digit = strchr(digits, *reader->at++);
        if (!digit)
            return -1;
        int32_t place = (int32_t)(digit - digits);
        value = value * 16 + (place < 16 ? place : place - 6);
    }
    return value;
}

/* The code point after `\u`, the second half of a surrogate pair included, or -1. */
static int32_t read_code_point(Reader *reader) {
    int32_t code = read_hex(reader);
    if (code >= 0xd800 && code < 0xdc00) {
        if (!take_word(reader, "\\u"))
            return -1;
        int32_t low = read_hex(reader);
        if (low < 0xdc00 || low >= 0xe000)
            return -1;
        return 0x10000 + (code - 0xd800) * 0x400 + low - 0xdc00;
    }
    return code >= 0xdc00 && code < 0xe000 ? -1 : code;
}

static char *put_utf8(char *out, int32_t code) {
    if (code < 0x80) {
        *out++ = (char)code;
    } else if (code < 0x800) {
        *out++ = (char)(0xc0 | code >> 6);
        *out++ = (char)(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
        *out++ = (char)(0xe0 | code >> 12);
        *out++ = (char)(0x80 | (code >> 6 & 0x3f));
        *out++ = (char)(0x80 | (code & 0x3f));
    } else {
        *out++ = (char)(0xf0 | code >> 18);
        *out++ = (char)(0x80 | (code >> 12 & 0x3f));
        *out++ = (char)(0x80 | (code >> 6 & 0x3f));
        *out++ = (char)(0x80 | (code & 0x3f));
    }
    return out;
}

/* A string, its first quote already passed; NULL where it is none. Never longer than its source. */
static const char *read_string(Reader *reader) {
    static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    const char *close = reader->at;
    while (close < reader->end && *close != '"')
        close += *close == '\\' ? 2 : 1;
    if (close >= reader->end)
        return NULL;
    char *text = reader->take(reader->owner, (size_t)(close - reader->at) + 1);
    char *out = text;
    while (text && *reader->at != '"') {
        char c = *reader->at++;
        if ((unsigned char)c < 0x20)
            return NULL;
        if (c != '\\') {
            *out++ = c;
        } else if (*reader->at == 'u') {
            reader->at++;
            int32_t code = read_code_point(reader);
            if (code <= 0) /* no name or text of the protocol holds a NUL */
                return NULL;
            out = put_utf8(out, code);
        } else {
            const char *escape = *reader->at ? strchr(escapes, *reader->at) : NULL;
            if (!escape)
                return NULL;
            reader->at++;
            *out++ = meanings[escape - escapes];
        }
    }
    if (!text)
        return NULL;
    *out = '\0';
    reader->at = close + 1;
    return text;
}

static const char *read_number(Reader *reader) {
    const char *start = reader->at;
    while (reader->at < reader->end && *reader->at && strchr("+-0123456789.eE", *reader->at))
        reader->at++;
    size_t length = (size_t)(reader->at - start);
    char *text = length ? reader->take(reader->owner, length + 1) : NULL;
    if (!text)
        return NULL;
    memcpy(text, start, length);
    text[length] = '\0';
    return text;
}

/* The elements of an array or the members of an object, up to its closing character. */
static bool read_children(Reader *reader, Json *parent, char close) {
    Json **last = &parent->first;
    if (take_character(reader, close))
        return true;
    do {
        const char *name = NULL;
        if (close == '}') {
            if (!take_character(reader, '"') || !(name = read_string(reader)))
                return false;
            if (!take_character(reader, ':'))
                return false;
        }
        Json *child = read_value(reader);
        if (!child)
            return false;
        child->name = name;
        *last = child;
        last = &child->next;
    } while (take_character(reader, ','));
    return take_character(reader, close);
}

static Json *read_value(Reader *reader) {
    Json *value = reader->take(reader->owner, sizeof *value);
    if (!value || ++reader->depth > MAX_DEPTH)
        return NULL;
    *value = (Json){.kind = JSON_NULL};
    bool right;
    if (take_character(reader, '{')) {
        value->kind = JSON_OBJECT;
        right = read_children(reader, value, '}');
    } else if (take_character(reader, '[')) {
        value->kind = JSON_ARRAY;
        right = read_children(reader, value, ']');
    } else if (take_character(reader, '"')) {
        value->kind = JSON_STRING;
        right = (value->text = read_string(reader)) != NULL;
    } else if (take_word(reader, "true")) {
        value->kind = JSON_TRUE;
        right = true;
    } else if (take_word(reader, "false")) {
        value->kind = JSON_FALSE;
        right = true;
    } else if (take_word(reader, "null")) {
        right = true;
    } else {
        value->kind = JSON_NUMBER;
        right = (value->text = read_number(reader)) != NULL;
    }
    reader->depth--;
    return right ? value : NULL;
}

const Json *json_read(const char *bytes, size_t length, JsonMemory *take, void *owner) {
    Reader reader = {bytes, bytes + length, take, owner, 0};
    Json *value = read_value(&reader);
    skip_space(&reader);
    return reader.at == reader.end ? value : NULL;
}

const Json *json_member(const Json *object, const char *name) {
    if (!object || object->kind != JSON_OBJECT)
        return NULL;
    for (const Json *member = object->first; member; member = member->next)
        if (strcmp(member->name, name) == 0)
            return member;
    return NULL;
}
