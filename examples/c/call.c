/* Arguments, outputs and memory of one call. */

#include "call.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Block {
    Block *next;
    void *data;
};

void refuse(Call *call, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(call->message, sizeof call->message, format, arguments);
    va_end(arguments);
    longjmp(call->refused, 1);
}

void *allocate(Call *call, size_t count, size_t size) {
    Block *block = malloc(sizeof *block);
    void *data = calloc(count ? count : 1, size);
    if (!block || !data) {
        free(block);
        free(data);
        refuse(call, "no memory for %zu elements of %zu bytes", count, size);
    }
    *block = (Block){call->memory, data};
    call->memory = block;
    return data;
}

void free_all(Call *call) {
    while (call->memory) {
        Block *block = call->memory;
        call->memory = block->next;
        free(block->data);
        free(block);
    }
}

size_t size_of(Dtype dtype) {
    static const size_t sizes[DTYPES] = {1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8};
    return sizes[dtype];
}

const Tensor *optional_tensor(Call *call, const char *name, Dtype dtype, int rank) {
    for (int i = 0; i < call->input_count; i++) {
        const Tensor *found = &call->inputs[i];
        if (strcmp(found->name, name) == 0) {
            if (found->dtype != dtype || found->rank != rank)
                refuse(call, "%s has another dtype or rank than the operation takes", name);
            return found;
        }
    }
    return NULL;
}

const Tensor *tensor(Call *call, const char *name, Dtype dtype, int rank) {
    const Tensor *found = optional_tensor(call, name, dtype, rank);
    if (!found)
        refuse(call, "%s is missing", name);
    return found;
}

static const Json *parameter(Call *call, const char *name, JsonKind kind) {
    const Json *found = json_member(call->parameters, name);
    if (!found || found->kind != kind)
        refuse(call, "the parameter %s is missing or of another kind", name);
    return found;
}

bool has(const Call *call, const char *name) {
    const Json *found = json_member(call->parameters, name);
    return found && found->kind != JSON_NULL;
}

double number(Call *call, const char *name) {
    return strtod(parameter(call, name, JSON_NUMBER)->text, NULL);
}

double number_or(Call *call, const char *name, double otherwise) {
    return has(call, name) ? number(call, name) : otherwise;
}

uint64_t unsigned_number(Call *call, const char *name) {
    const char *digits = parameter(call, name, JSON_NUMBER)->text;
    if (digits[strspn(digits, "0123456789")] != '\0' || strlen(digits) > 20)
        refuse(call, "the parameter %s is no integer of 64 bits", name);
    return strtoull(digits, NULL, 10);
}

bool boolean(Call *call, const char *name) {
    const Json *found = json_member(call->parameters, name);
    if (!found || (found->kind != JSON_TRUE && found->kind != JSON_FALSE))
        refuse(call, "the parameter %s is missing or no boolean", name);
    return found->kind == JSON_TRUE;
}

const char *text(Call *call, const char *name) {
    return parameter(call, name, JSON_STRING)->text;
}

void *answer(Call *call, const char *name, Dtype dtype, int rank, const size_t *shape) {
    Tensor *output = &call->outputs[call->output_count];
    *output = (Tensor){.dtype = dtype, .rank = rank, .count = 1};
    snprintf(output->name, sizeof output->name, "%s", name);
    for (int i = 0; i < rank; i++) {
        output->shape[i] = shape[i];
        if (shape[i] && output->count > SIZE_MAX / 16 / shape[i])
            refuse(call, "the answer %s is too large", name);
        output->count *= shape[i];
    }
    output->data = allocate(call, output->count, size_of(dtype));
    call->output_count++;
    return output->data;
}

float *answer_like(Call *call, const char *name, const Tensor *input) {
    return answer(call, name, F32, input->rank, input->shape);
}
