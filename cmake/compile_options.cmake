# Language level, warnings and floating-point rules of every target; KVX_SANITIZE adds a sanitizer
# to all of them.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 99)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# KVX_SHARED_CORE: the Python module and the tools link libkvx.so, which then shows the core's C++
# names beside the C ABI. A wheel so holds the kernels once. ./dev wheel sets it.
option(KVX_SHARED_CORE "the Python module and the tools link libkvx.so" OFF)
set(kvx_visibility hidden)
if(KVX_SHARED_CORE)
  set(kvx_visibility default)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fno-semantic-interposition>)
endif()
set(CMAKE_CXX_VISIBILITY_PRESET ${kvx_visibility})
set(CMAKE_C_VISIBILITY_PRESET ${kvx_visibility})
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# No contraction anywhere a byte is decided (docs/numbers.md); attention kernels opt back in where
# they are written.
# CUDA sources have options of their own (cmake/cuda.cmake). A warning is an error in our own builds,
# not in a release: whoever installs kvx may have a compiler that warns of more.
set(kvx_werror $<$<NOT:$<CONFIG:Release>>:-Werror>)
add_compile_options(
  "$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wpedantic;${kvx_werror};-Wshadow;-Wconversion>"
  "$<$<COMPILE_LANGUAGE:C,CXX>:-Wno-sign-conversion;-ffp-contract=off>")

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # false alarms at -O3: on std::string (GCC bug 105651), and on fmt 9's fill characters where no
  # precompiled header hides them
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-Wno-restrict;-Wno-stringop-overflow>")
endif()

set(KVX_SANITIZE "" CACHE STRING "what -fsanitize= gets for the whole tree, empty for nothing")
option(KVX_FUZZ "build the fuzz targets (clang only)" OFF)

if(KVX_SANITIZE)
  add_compile_options(-fsanitize=${KVX_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${KVX_SANITIZE})
  if(KVX_SANITIZE MATCHES "thread")
    # clang 14 links TSan's operator new as a strong symbol; ops_test brings one that counts.
    add_link_options(-Wl,-z,muldefs)
  endif()
endif()
if(KVX_FUZZ AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  message(FATAL_ERROR "KVX_FUZZ needs clang, CMAKE_CXX_COMPILER is ${CMAKE_CXX_COMPILER}")
endif()

# A target of code that fuzz targets run: libFuzzer is told which of its branches an input took.
function(kvx_trace_for_fuzzing target)
  if(KVX_FUZZ)
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
endfunction()

# A target whose own code nothing waits for (tests, the tool): where such code is compiled with
# symbols it is compiled for a short build. In a release it is optimised as everything is.
function(kvx_compile_quickly target)
  if(KVX_SANITIZE)
    set(options -O0)  # half the time of -O1, and no check is optimised away
  else()
    # A fifth less time than -O1. Nearly as short is -O0, but there GCC does not follow values and
    # warns of no uninitialised one.
    set(options -Og)
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # What GCC says of arrays' bounds at -Og it takes back at -O2; AddressSanitizer knows.
      list(APPEND options -Wno-array-bounds -Wno-stringop-overflow -Wno-stringop-overread)
    endif()
  endif()
  target_compile_options(
    ${target} PRIVATE "$<$<AND:$<CONFIG:RelWithDebInfo>,$<COMPILE_LANGUAGE:C,CXX>>:${options}>")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # More false alarms on std::string at -O3 (as GCC bug 105651), which dev, at -Og, does not see.
    set(options -Wno-maybe-uninitialized -Wno-stringop-overflow -Wno-array-bounds)
    target_compile_options(
      ${target} PRIVATE "$<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:C,CXX>>:${options}>")
  endif()
endfunction()

# What nearly every file includes. Not CLI11, whose header makes objects: each file that sees it
# compiles them, three to six seconds; not nlohmann-json, half a second for those that do not use it.
set(KVX_COMMON_HEADERS
    <fmt/format.h> <algorithm> <array> <cmath> <cstdint> <cstring> <functional> <limits> <memory>
    <optional> <span> <string> <string_view> <unordered_map> <utility> <variant> <vector>)

# target_precompile_headers, for C++ alone. (ccache knows GCC's precompiled headers only with
# -fpch-preprocess.) A file still includes what it uses: it must compile without,
# -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON.
#   kvx_precompile_headers(kvx_tool_parts PRIVATE ${KVX_COMMON_HEADERS})
function(kvx_precompile_headers name how)
  target_compile_options(
    ${name} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-fpch-preprocess>)
  if(how STREQUAL "PRIVATE")
    list(TRANSFORM ARGN REPLACE "^(.+)$" "$<$<COMPILE_LANGUAGE:CXX>:\\1>")
  endif()
  target_precompile_headers(${name} ${how} ${ARGN})
endfunction()

# A target whose sources are compiled eight at a time, in half to a third of the time: what they
# include and instantiate is compiled once. Names of unnamed namespaces meet there; a test file whose
# names others use too puts them into a namespace of its own name. One file after the other:
# -DKVX_UNITE=OFF. The library's sources too, of which a change would then compile eight: ALL, for
# builds that are made once.
set(KVX_UNITE ON CACHE STRING
    "compile several sources at a time: ON (not the library's), ALL or OFF")
function(kvx_unite name)
  if(KVX_UNITE)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  endif()
endfunction()
function(kvx_unite_library name)
  if(KVX_UNITE STREQUAL "ALL")
    kvx_unite(${name})
  endif()
endfunction()
