// UndefinedBehaviorSanitizer's calls, of code compiled with -fsanitize=undefined and
// -fno-sanitize-recover: each ends the launch.
#include "runtime.h"

namespace {

// What every report begins with.
struct Place {
  const char* file;
  unsigned line, column;
};

[[noreturn]] void undefined(const void* data, const char* what) {
  const auto& place = *static_cast<const Place*>(data);
  emulator::fail("undefined behaviour: %s, at %s:%u", what, place.file, place.line);
}

struct TypeMismatch {
  Place place;
  const void* type;
  unsigned char log_alignment, kind;
};

}  // namespace

#define CUFA2_UNDEFINED(name, what)                                        \
  extern "C" void __ubsan_handle_##name##_abort(const void* data) { undefined(data, what); }

CUFA2_UNDEFINED(add_overflow, "a sum overflows")
CUFA2_UNDEFINED(sub_overflow, "a difference overflows")
CUFA2_UNDEFINED(mul_overflow, "a product overflows")
CUFA2_UNDEFINED(negate_overflow, "a negation overflows")
CUFA2_UNDEFINED(divrem_overflow, "a division by zero or one that overflows")
CUFA2_UNDEFINED(shift_out_of_bounds, "a shift by too many bits or of a negative number")
CUFA2_UNDEFINED(out_of_bounds, "an index outside its array")
CUFA2_UNDEFINED(vla_bound_not_positive, "an array of no elements")
CUFA2_UNDEFINED(load_invalid_value, "a bool that is neither true nor false")
CUFA2_UNDEFINED(nonnull_arg, "a null argument")
CUFA2_UNDEFINED(pointer_overflow, "a pointer leaves the address space")
CUFA2_UNDEFINED(invalid_builtin, "a count of zero bits of zero")

extern "C" void __ubsan_handle_type_mismatch_v1_abort(const void* data, unsigned long address) {
  const auto& mismatch = *static_cast<const TypeMismatch*>(data);
  const unsigned long alignment = 1ul << mismatch.log_alignment;
  undefined(data, !address               ? "a null pointer"
                  : address % alignment  ? "a misaligned pointer"
                                         : "too little room for the type");
}
extern "C" void __ubsan_handle_builtin_unreachable(const void* data) {
  undefined(data, "code that cannot be reached is");
}
extern "C" void __ubsan_handle_missing_return(const void* data) {
  undefined(data, "a function returns nothing");
}
