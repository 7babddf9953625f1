#version 460
// Writes a word at one address and copies a word from another: whether the device reaches the end of a buffer is tried, not believed.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 1) in;

layout(push_constant) uniform Push {
    uint64_t to;
    uint64_t from;
    uint64_t copy;
    uint value;
} p;

void main() {
    LDU(p.to) = p.value;
    LDU(p.copy) = LDU(p.from);
}
