# The flags of every instruction-set level. A level is a folder, src/<path>/isa/<name>/: its sources,
# level_<name>.cpp, are compiled with the flags, and its headers alone hold the level's intrinsics.
#
# A level's code has more instructions than the machine may have, so nothing outside the folder may
# be built with its flags, and it runs only after src/device has found the level on this machine.
# docs/howto/add-a-cpu-level.md lists what a new level needs.
set(KVX_CPU_LEVELS scalar)
set(KVX_CPU_FLAGS_scalar "")

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND KVX_CPU_LEVELS avx2 avxvnni avx512 avx512amx)
  set(KVX_CPU_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(KVX_CPU_FLAGS_avxvnni -mavx2 -mfma -mf16c -mavxvnni)  # of attend alone
  set(KVX_CPU_FLAGS_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi
                           -mgfni -mfma -mf16c -mprefer-vector-width=512)
  set(KVX_CPU_FLAGS_avx512amx ${KVX_CPU_FLAGS_avx512} -mavx512bf16 -mamx-tile -mamx-bf16)  # of attend alone
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|ARM64|arm64)$")
  list(APPEND KVX_CPU_LEVELS neon dotprod)
  set(KVX_CPU_FLAGS_neon "")
  set(KVX_CPU_FLAGS_dotprod -march=armv8.2-a+dotprod)  # of attend alone
endif()

# Gives each level's source in `sources_var` its flags, and drops the files of levels that this
# processor family lacks.
# -fno-trapping-math and -fno-math-errno change no value: they let the compiler compute both sides of
# a choice, without which loops over small floats do not vectorise. A sanitizer's checks take most of
# such a file's compile time, and at -O3 twice as much (65 s instead of 150 for attend's AVX-512).
# UndefinedBehaviorSanitizer leaves pointers of the levels with intrinsics to AddressSanitizer, which
# halves it again (50 s, 27 s); in the scalar level, of the same loops, it checks everything.
# Must be called in the directory that makes the target (source properties belong to a directory).
function(kvx_set_cpu_level_flags sources_var)
  set(kept "")
  foreach(source IN LISTS ${sources_var})
    if(source MATCHES "/isa/([a-z0-9]+)/[a-z0-9_]+\\.cpp$")
      set(level ${CMAKE_MATCH_1})
      if(NOT level IN_LIST KVX_CPU_LEVELS)
        continue()
      endif()
      set(flags ${KVX_CPU_FLAGS_${level}})
      if(NOT KVX_SANITIZE)
        list(APPEND flags -O3)
      elseif(KVX_SANITIZE MATCHES "undefined" AND NOT level STREQUAL "scalar")
        list(APPEND flags -fno-sanitize=null,pointer-overflow,alignment,object-size)
      endif()
      list(APPEND flags -fno-trapping-math -fno-math-errno)
      if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
        list(APPEND flags -Wno-uninitialized -Wno-maybe-uninitialized)  # its AVX-512 headers, GCC bug 105593
      endif()
      if(source MATCHES "/attend/cpu/")  # decides no byte: products may be fused
        list(APPEND flags -ffp-contract=fast)
      endif()
      # Headers are precompiled for one instruction set.
      set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${flags}"
                                                       SKIP_PRECOMPILE_HEADERS ON)
    endif()
    list(APPEND kept ${source})
  endforeach()
  set(${sources_var} ${kept} PARENT_SCOPE)
endfunction()
