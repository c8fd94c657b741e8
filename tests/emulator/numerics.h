// Arithmetic of the hardware, where it is not that of the host: of a Hopper card, whichever is
// emulated. tests/test_primitives.py holds it to what an H200 returns.
#pragma once
#include <cstdint>

namespace emulator {

std::uint16_t to_fp16(float x);  // to nearest even
std::uint16_t to_bf16(float x);
float from_fp16(std::uint32_t bits);
float from_bf16(std::uint32_t bits);
std::uint32_t to_tf32(float x);

float exp2_approx(float x);  // ex2.approx.ftz.f32; that of the device is up to 2 ulp off
float reciprocal_approx(float x);  // rcp.approx.ftz.f32; up to 1 ulp off

// D += A B of a warp, on tensor cores; fragments as prim/mma.cuh says.
void add_product_of_fp16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);
void add_product_of_bf16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);
void add_product_of_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);
void add_product_of_float64(double (&d)[4], const double (&a)[4], const double (&b)[2]);

// One element of a product that sums 16 terms.
float dot_of_halves(bool fp16, const std::uint16_t* a, const std::uint16_t* b, float sum);

}  // namespace emulator
