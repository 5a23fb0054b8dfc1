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
  # What Linux calls the last feature of each.
  set(KVX_CPU_FEATURE_avx2 avx2)
  set(KVX_CPU_FEATURE_avxvnni avx_vnni)
  set(KVX_CPU_FEATURE_avx512 avx512_vnni)
  set(KVX_CPU_FEATURE_avx512amx amx_bf16)
  set(KVX_CPU_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(KVX_CPU_FLAGS_avxvnni -mavx2 -mfma -mf16c -mavxvnni)  # of attend alone
  set(KVX_CPU_FLAGS_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi
                           -mgfni -mfma -mf16c -mprefer-vector-width=512)
  set(KVX_CPU_FLAGS_avx512amx ${KVX_CPU_FLAGS_avx512} -mavx512bf16 -mamx-tile -mamx-bf16)  # of attend alone
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|ARM64|arm64)$")
  list(APPEND KVX_CPU_LEVELS neon dotprod)
  set(KVX_CPU_FLAGS_neon "")
  set(KVX_CPU_FLAGS_dotprod -march=armv8.2-a+dotprod)  # of attend alone
  if(APPLE)  # its compilers take dot products for given, and zig's -march has names of its own
    set(KVX_CPU_FLAGS_dotprod "")
  endif()
endif()

# Code with a sanitizer is not given away, and its levels take minutes to compile: without those that
# this machine lacks. ThreadSanitizer learns nothing of a level above AVX2.
if(KVX_SANITIZE AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  file(STRINGS /proc/cpuinfo features REGEX "^flags" LIMIT_COUNT 1)
  foreach(level IN ITEMS avx2 avxvnni avx512 avx512amx)
    if(NOT "${features} " MATCHES " ${KVX_CPU_FEATURE_${level}} " OR
       (KVX_SANITIZE MATCHES "thread" AND NOT level STREQUAL "avx2"))
      list(REMOVE_ITEM KVX_CPU_LEVELS ${level})
    endif()
  endforeach()
endif()

# Gives each level's source in `sources_var` its flags, drops the files of levels that are not
# compiled, and tells those that choose among levels which ones are.
# -fno-trapping-math and -fno-math-errno change no value: they let the compiler compute both sides of
# a choice, without which loops over small floats do not vectorise. A sanitizer's checks take most of
# such a file's compile time, and at -O3 twice as much (65 s instead of 150 for attend's AVX-512).
# UndefinedBehaviorSanitizer leaves pointers of the levels with intrinsics to AddressSanitizer, which
# halves it again (50 s, 27 s); in the scalar level, of the same loops, it checks everything.
# Must be called in the directory that makes the target (source properties belong to a directory).
function(kvx_set_cpu_level_flags sources_var)
  set(kept "")
  set(names ${KVX_CPU_LEVELS})
  list(TRANSFORM names REPLACE "amx$" ":amx")  # as device::name_of() spells them
  list(JOIN names " " names)
  set(definitions "KVX_CPU_LEVELS=\"${names}\"")
  foreach(level IN LISTS KVX_CPU_LEVELS)
    string(TOUPPER ${level} level)
    list(APPEND definitions KVX_HAS_LEVEL_${level})
  endforeach()
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
    if(source MATCHES "/cpu/dispatch\\.cpp$|/device/cpu_level\\.cpp$")
      set_source_files_properties(${source} PROPERTIES COMPILE_DEFINITIONS "${definitions}")
    endif()
    list(APPEND kept ${source})
  endforeach()
  set(${sources_var} ${kept} PARENT_SCOPE)
endfunction()
