/* A small reader of JSON: what safetensors headers and parameters need, bounded in depth. */

#ifndef JSON_H
#define JSON_H

#include <stddef.h>

typedef enum {
    JSON_NULL,
    JSON_FALSE,
    JSON_TRUE,
    JSON_NUMBER,
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT
} JsonKind;

typedef struct Json {
    JsonKind kind;
    const char *name;   /* within an object */
    const char *text;   /* of a string, decoded, or of a number, as written */
    struct Json *first; /* of an array's elements or an object's members */
    struct Json *next;  /* beside this one */
} Json;

/* The value that `length` bytes spell, or NULL where they are no JSON. Memory is taken from
   `take(owner, size)`, which may return NULL. */
typedef void *JsonMemory(void *owner, size_t size);
const Json *json_read(const char *bytes, size_t length, JsonMemory *take, void *owner);

/* A member of an object by name, or NULL. */
const Json *json_member(const Json *object, const char *name);

#endif
