/* One call of the suite: its arguments, and the answer that an operation builds (docs/protocol.md).

   An operation reads its arguments by name, and either answers with tensors or refuses. To refuse
   jumps out of it; whatever it allocated is freed by the main loop. */

#ifndef CALL_H
#define CALL_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "json.h"

enum { MAX_RANK = 4, MAX_TENSORS = 16, MAX_NAME = 64, MAX_MESSAGE = 200 };

typedef enum { BOOL8, U8, I8, U16, I16, F16, U32, I32, F32, U64, I64, F64, DTYPES } Dtype;

typedef struct {
    char name[MAX_NAME];
    Dtype dtype;
    int rank;
    size_t shape[MAX_RANK];
    size_t count; /* of elements */
    void *data;
} Tensor;

typedef struct Block Block; /* of memory, freed with its call */

typedef struct {
    const char *id;
    const char *operation;
    const Json *parameters;
    Tensor inputs[MAX_TENSORS];
    int input_count;
    Tensor outputs[MAX_TENSORS];
    int output_count;
    const char *hello; /* the text of the answer to hello, else NULL */
    char message[MAX_MESSAGE];
    jmp_buf refused;
    Block *memory;
} Call;

/* Leave the operation; the answer is an error with this text. */
_Noreturn void refuse(Call *call, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Zeroed memory for count elements of a size, freed with the call. */
void *allocate(Call *call, size_t count, size_t size);
void free_all(Call *call);

size_t size_of(Dtype dtype);

/* Arguments by name. Those that are missing or of another kind are refused. */
const Tensor *tensor(Call *call, const char *name, Dtype dtype, int rank);
const Tensor *optional_tensor(Call *call, const char *name, Dtype dtype, int rank);
double number(Call *call, const char *name);
double number_or(Call *call, const char *name, double otherwise);
uint64_t unsigned_number(Call *call, const char *name);
bool boolean(Call *call, const char *name);
const char *text(Call *call, const char *name);
bool has(const Call *call, const char *name);

/* A new output; its data is zeroed. */
void *answer(Call *call, const char *name, Dtype dtype, int rank, const size_t *shape);
float *answer_like(Call *call, const char *name, const Tensor *input);

#endif
