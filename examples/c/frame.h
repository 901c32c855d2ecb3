/* Frames of safetensors over stdin and stdout (docs/protocol.md). */

#ifndef FRAME_H
#define FRAME_H

#include "call.h"

/* The next call into `call`; false at the end of input. Refuses what is no call. */
bool read_call(Call *call);

/* Write the answer: the outputs, or the status `error` with the call's message. */
void write_answer(Call *call, const char *status);

#endif
