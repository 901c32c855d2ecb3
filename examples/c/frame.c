/* Reading a call and writing its answer. Every length is checked before it is believed. */

#include "frame.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint64_t MAX_FRAME = (uint64_t)1 << 30;

static const char *const DTYPE_NAMES[DTYPES] = {"BOOL", "U8",  "I8",  "U16", "I16", "F16",
                                                "U32",  "I32", "F32", "U64", "I64", "F64"};

static uint64_t little_endian(const unsigned char *bytes) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | bytes[i];
    return value;
}

static void put_little_endian(unsigned char *bytes, uint64_t value) {
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(value >> 8 * i);
}

static void *take(void *owner, size_t size) {
    return allocate(owner, 1, size);
}

/* An integer element of an array, at most `limit`. */
static size_t integer(Call *call, const Json *value, size_t limit) {
    if (!value || value->kind != JSON_NUMBER || strlen(value->text) > 18 ||
        value->text[strspn(value->text, "0123456789")] != '\0')
        refuse(call, "the header holds no integer where one must be");
    unsigned long long found = strtoull(value->text, NULL, 10);
    if (found > limit)
        refuse(call, "the header holds an integer that is too large");
    return (size_t)found;
}

static void read_tensor(Call *call, const Json *entry, char *data, size_t size) {
    if (call->input_count == MAX_TENSORS || strlen(entry->name) >= MAX_NAME)
        refuse(call, "too many tensors, or too long a name");
    Tensor *out = &call->inputs[call->input_count++];
    *out = (Tensor){.count = 1, .dtype = DTYPES};
    memcpy(out->name, entry->name, strlen(entry->name) + 1);
    const Json *dtype = json_member(entry, "dtype"), *shape = json_member(entry, "shape");
    const Json *offsets = json_member(entry, "data_offsets");
    if (!dtype || dtype->kind != JSON_STRING || !shape || !offsets || !offsets->first)
        refuse(call, "%s: no dtype, shape or data_offsets", out->name);
    for (int i = 0; i < DTYPES; i++)
        if (strcmp(dtype->text, DTYPE_NAMES[i]) == 0)
            out->dtype = (Dtype)i;
    if (out->dtype == DTYPES)
        refuse(call, "%s: unknown dtype %.16s", out->name, dtype->text);
    for (const Json *length = shape->first; length; length = length->next) {
        if (out->rank == MAX_RANK)
            refuse(call, "%s: more than %d dimensions", out->name, MAX_RANK);
        size_t n = integer(call, length, MAX_FRAME);
        if (n && out->count > MAX_FRAME / n)
            refuse(call, "%s: its shape is too large", out->name);
        out->count *= n;
        out->shape[out->rank++] = n;
    }
    size_t begin = integer(call, offsets->first, size);
    size_t end = integer(call, offsets->first->next, size);
    size_t each = size_of(out->dtype);
    if (begin > end || (end - begin) / each != out->count || (end - begin) % each != 0)
        refuse(call, "%s: its offsets do not fit its shape", out->name);
    if ((uintptr_t)(data + begin) % each != 0)
        refuse(call, "%s: its data is not aligned", out->name);
    out->data = data + begin;
}

static const char *entry_text(Call *call, const Json *metadata, const char *name) {
    const Json *found = json_member(metadata, name);
    if (!found || found->kind != JSON_STRING)
        refuse(call, "the metadata has no %s", name);
    return found->text;
}

static void read_blob(Call *call, char *blob, size_t size) {
    uint64_t header_size = size < 8 ? UINT64_MAX : little_endian((unsigned char *)blob);
    if (header_size > size - 8)
        refuse(call, "the header is longer than its frame");
    const Json *header = json_read(blob + 8, header_size, take, call);
    const Json *metadata = json_member(header, "__metadata__");
    if (!metadata)
        refuse(call, "the header is no JSON object with __metadata__");
    call->id = entry_text(call, metadata, "id");
    call->operation = entry_text(call, metadata, "operation");
    const char *parameters = entry_text(call, metadata, "parameters");
    call->parameters = json_read(parameters, strlen(parameters), take, call);
    if (!call->parameters || call->parameters->kind != JSON_OBJECT)
        refuse(call, "the parameters are no JSON object");
    for (const Json *entry = header->first; entry; entry = entry->next)
        if (entry != metadata)
            read_tensor(call, entry, blob + 8 + header_size, size - 8 - header_size);
}

bool read_call(Call *call) {
    unsigned char length[8];
    if (fread(length, 1, 8, stdin) != 8)
        return false;
    uint64_t size = little_endian(length);
    if (size > MAX_FRAME) {
        fprintf(stderr, "a frame of %llu bytes is too long\n", (unsigned long long)size);
        exit(1);
    }
    char *blob = allocate(call, size, 1);
    if (fread(blob, 1, size, stdin) != size)
        return false;
    read_blob(call, blob, size);
    return true;
}

/* A JSON string of printable ASCII; other bytes become question marks. */
static void put_string(char *out, size_t room, const char *text) {
    size_t used = 0;
    for (; *text && used + 3 < room; text++) {
        if (*text == '"' || *text == '\\')
            out[used++] = '\\';
        out[used++] = *text >= ' ' && *text <= '~' ? *text : '?';
    }
    out[used] = '\0';
}

void write_answer(Call *call, const char *status) {
    enum { ROOM = 16384 };
    char header[ROOM], id[64], words[ROOM / 2];
    put_string(id, sizeof id, call->id);
    put_string(words, sizeof words, call->hello ? call->hello : call->message);
    int used = snprintf(header, ROOM,
                        "{\"__metadata__\":{\"id\":\"%s\",\"status\":\"%s\",\"%s\":\"%s\"}",
                        id, status, call->hello ? "hello" : "message", words);
    size_t offset = 0;
    for (int i = 0; i < call->output_count; i++) {
        const Tensor *output = &call->outputs[i];
        size_t size = output->count * size_of(output->dtype);
        used += snprintf(header + used, ROOM - used, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[",
                         output->name, DTYPE_NAMES[output->dtype]);
        for (int k = 0; k < output->rank; k++)
            used += snprintf(header + used, ROOM - used, "%s%zu", k ? "," : "", output->shape[k]);
        used += snprintf(header + used, ROOM - used, "],\"data_offsets\":[%zu,%zu]}", offset,
                         offset + size);
        offset += size;
    }
    used += snprintf(header + used, ROOM - used, "}");
    unsigned char lengths[16];
    put_little_endian(lengths, 8 + (uint64_t)used + offset);
    put_little_endian(lengths + 8, (uint64_t)used);
    fwrite(lengths, 1, sizeof lengths, stdout);
    fwrite(header, 1, used, stdout);
    for (int i = 0; i < call->output_count; i++)
        fwrite(call->outputs[i].data, size_of(call->outputs[i].dtype), call->outputs[i].count,
               stdout);
    if (fflush(stdout) != 0)
        exit(1);
}
