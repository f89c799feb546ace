#pragma once

namespace fastamp::ops {

/// Makes a dispatcher kernel of a function that takes an op's arguments as one struct: a list of 17
/// is then written in the op's declaration and in the struct, and not once per dispatch key.
/// of(fastamp::ops::x) has the signature of the op, whose arguments are the struct's members in
/// order.
template <typename Args, auto kRun>
struct FromArgs {
  template <typename... T>
  static void call(T... args) {
    kRun(Args{args...});
  }
  template <typename... T>
  static constexpr auto of(void (* /*op*/)(T...)) {
    return &call<T...>;
  }
};

}  // namespace fastamp::ops
