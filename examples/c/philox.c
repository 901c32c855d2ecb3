/* Philox4x32-10 (SPEC 13.2). */

#include "operations.h"

uint64_t philox(uint64_t seed, uint64_t request, uint64_t position, uint64_t stream) {
    uint32_t counter[4] = {(uint32_t)position, (uint32_t)request, (uint32_t)stream, 0};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t first = (uint64_t)0xD2511F53 * counter[0];
        uint64_t second = (uint64_t)0xCD9E8D57 * counter[2];
        uint32_t mixed[4] = {(uint32_t)(second >> 32) ^ counter[1] ^ key[0], (uint32_t)second,
                             (uint32_t)(first >> 32) ^ counter[3] ^ key[1], (uint32_t)first};
        for (int i = 0; i < 4; i++)
            counter[i] = mixed[i];
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return (uint64_t)counter[1] << 32 | counter[0];
}

void philox_operation(Call *call) {
    const Tensor *positions = tensor(call, "positions", I64, 1);
    uint64_t seed = unsigned_number(call, "seed"), request = unsigned_number(call, "request");
    uint64_t stream = has(call, "stream") ? unsigned_number(call, "stream") : 0;
    const int64_t *at = positions->data;
    uint64_t *y = answer(call, "y", U64, 1, positions->shape);
    for (size_t i = 0; i < positions->count; i++) {
        if (at[i] < 0 || at[i] > UINT32_MAX || request > UINT32_MAX || stream > UINT32_MAX)
            refuse(call, "a position, the request or the stream is outside 0 to 2^32 - 1");
        y[i] = philox(seed, request, (uint64_t)at[i], stream);
    }
}
