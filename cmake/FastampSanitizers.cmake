# FASTAMP_SANITIZE="address;undefined" or "thread": instruments our own targets only. torch's
# libraries are not instrumented, so reports from inside them need suppressions.
include_guard(GLOBAL)
set(FASTAMP_SANITIZE "" CACHE STRING "Sanitizers for the host code: address;undefined or thread")

function(fastamp_enable_sanitizers target)
  if(NOT FASTAMP_SANITIZE)
    return()
  endif()
  list(JOIN FASTAMP_SANITIZE "," names)
  target_compile_options(
    ${target}
    PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${names};-fno-omit-frame-pointer>"
  )
  target_link_options(${target} PRIVATE "-fsanitize=${names}")
endfunction()
