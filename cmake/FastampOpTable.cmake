# The op table without the lines that the torch we build against has no op for: lists differ by
# version (2.13 dropped the overloads that take Dimname, 2.12 brought ops that 2.11 lacks), and the
# compiler needs each op's declaration. Policies stay where they are written, in op_table.inc.
#
# Out: <build>/src/autocast/torch_op_table.inc, written at configure time.
include_guard(GLOBAL)

# Sets <result> to whether torch declares at::_ops::<op>. The declaration is in the header of the op
# without its overload: mean_dim's is in mean_ops.h.
function(_fastamp_torch_has_op op result)
  set(base "${op}")
  set(found FALSE)
  while(base)
    set(header "${FASTAMP_TORCH_DIR}/include/ATen/ops/${base}_ops.h")
    if(EXISTS "${header}")
      file(STRINGS "${header}" lines REGEX "^struct TORCH_API ${op} {")
      if(lines)
        set(found TRUE)
        break()
      endif()
    endif()
    string(FIND "${base}" "_" cut REVERSE)
    if(cut LESS 1)
      break()
    endif()
    string(SUBSTRING "${base}" 0 ${cut} base)
  endwhile()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# Writes <output>: <input> without ops that torch lacks. An op whose redispatch target is missing is
# left out as well.
function(fastamp_filter_op_table input output)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${input}")
  file(STRINGS "${input}" lines REGEX "^FASTAMP_OP")
  set(kept "// Made from op_table.inc for torch ${FASTAMP_TORCH_VERSION}; do not edit.\n")
  set(dropped "")
  foreach(line IN LISTS lines)
    string(REGEX MATCH "^FASTAMP_OP[A-Z_]*\\(([A-Za-z0-9_]+)," match "${line}")
    set(op "${CMAKE_MATCH_1}")
    _fastamp_torch_has_op(${op} has_op)
    if(line MATCHES "^FASTAMP_OP_APPEND\\(.*, ([A-Za-z0-9_]+)\\)")
      _fastamp_torch_has_op(${CMAKE_MATCH_1} has_redispatch)
    else()
      set(has_redispatch TRUE)
    endif()
    if(has_op AND has_redispatch)
      string(APPEND kept "${line}\n")
    else()
      list(APPEND dropped ${op})
    endif()
  endforeach()
  # Rewritten only if it changed: every kernel is compiled from it.
  file(CONFIGURE OUTPUT "${output}" CONTENT "${kept}" @ONLY)
  if(dropped)
    list(JOIN dropped ", " names)
    message(STATUS "fastamp: torch ${FASTAMP_TORCH_VERSION} has no ${names}")
  endif()
endfunction()

# Sets <result> to whether torch's _scaled_mm, an op without a promise of stability, takes the
# arguments that src/float8/product.cpp gives it.
function(fastamp_torch_has_scaled_mm result)
  set(header "${FASTAMP_TORCH_DIR}/include/ATen/ops/_scaled_mm_ops.h")
  set(lines "")
  if(EXISTS "${header}")
    string(
      CONCAT wanted
      "schema_str = \"_scaled_mm\\(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, "
      "Tensor\\? bias=None, Tensor\\? scale_result=None, ScalarType\\? out_dtype=None, "
      "bool use_fast_accum=False\\) -> Tensor\""
    )
    file(STRINGS "${header}" lines REGEX "${wanted}")
  endif()
  if(lines)
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
    message(STATUS "fastamp: torch ${FASTAMP_TORCH_VERSION} has no _scaled_mm: no fp8 regions")
  endif()
endfunction()
