/* A bitforbit backend in C11: read a call, compute it, answer, until the input ends. */

#include <stdio.h>
#include <string.h>

#include "frame.h"
#include "operations.h"

static const struct {
    const char *name;
    void (*compute)(Call *call);
} OPERATIONS[] = {
    {"exp", exp_operation},
    {"log", log_operation},
    {"sin", sin_operation},
    {"cos", cos_operation},
    {"tanh", tanh_operation},
    {"sigmoid", sigmoid_operation},
    {"silu", silu_operation},
    {"gelu_tanh", gelu_tanh_operation},
    {"softmax", softmax_operation},
    {"linear", linear_operation},
    {"quantize_int4", quantize_int4_operation},
    {"quantize_int8", quantize_int8_operation},
    {"linear_int4", linear_int4_operation},
    {"linear_w4a16", linear_w4a16_operation},
    {"linear_q4_0", linear_q4_0_operation},
    {"linear_q8_0", linear_q8_0_operation},
    {"rms_norm", rms_norm_operation},
    {"rope_constants", rope_constants_operation},
    {"rope", rope_operation},
    {"attention", attention_operation},
    {"gated_mlp", gated_mlp_operation},
    {"philox", philox_operation},
    {"sample", sample_operation},
};
enum { COUNT = sizeof OPERATIONS / sizeof *OPERATIONS };

static void hello(Call *call) {
    enum { ROOM = 2048 };
    char *text = allocate(call, ROOM, 1);
    int used = snprintf(text, ROOM, "{\"protocol\":1,\"name\":\"c\",\"operations\":[");
    for (int i = 0; i < COUNT; i++)
        used += snprintf(text + used, ROOM - used, "%s\"%s\"", i ? "," : "", OPERATIONS[i].name);
    snprintf(text + used, ROOM - used,
             "],\"numerics\":{\"operands\":\"float32\",\"accumulator\":\"exact\",\"fma\":false,"
             "\"flush_to_zero\":false,\"kv\":\"float32\"}}");
    call->hello = text;
}

/* Compute a call; returns the status of its answer. */
static const char *compute(Call *call) {
    if (strcmp(call->operation, "hello") == 0) {
        hello(call);
        return "ok";
    }
    for (int i = 0; i < COUNT; i++) {
        if (strcmp(call->operation, OPERATIONS[i].name) == 0) {
            OPERATIONS[i].compute(call);
            return "ok";
        }
    }
    return "not implemented";
}

int main(void) {
    static Call call;
    for (;;) {
        const char *volatile status = "error";
        memset(&call, 0, sizeof call);
        call.id = "";
        if (setjmp(call.refused) == 0) {
            if (!read_call(&call))
                return 0;
            status = compute(&call);
        } else {
            call.output_count = 0;
        }
        write_answer(&call, status);
        free_all(&call);
    }
}
