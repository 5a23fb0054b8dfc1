# KVX_CUDA: the CUDA backend. AUTO builds it where nvcc is found, ON fails without, OFF leaves it
# out; KVX_HAS_CUDA is what came of it.
#
# The runtime is linked statically, so libkvx.so also loads on a machine without a driver.
set(KVX_CUDA AUTO CACHE STRING "the CUDA backend: AUTO, ON or OFF")
set_property(CACHE KVX_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT KVX_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVX_CUDA is '${KVX_CUDA}'; expected AUTO, ON or OFF")
endif()

# What kernels are compiled for, one target after the other:
#   90a         machine code of that compute capability
#   80-virtual  PTX, which a driver compiles for any device that is as new
#   80-on-90    what 80-virtual becomes on a device of 9.0, compiled here: runs an older
#               architecture's code on a newer device without waiting for its driver
set(KVX_CUDA_TARGETS 90a CACHE STRING "compute capabilities of the kernels, as cmake/cuda.cmake says")

# A build without optimised kernels takes a third of nvcc's time. It computes the same and says what
# it is (kvx info, cmake --install); kvx bench --device cuda refuses it.
set(KVX_CUDA_OPTIMIZE ON CACHE STRING "optimised kernels: ON, OFF, or AUTO: where there is a GPU")
set_property(CACHE KVX_CUDA_OPTIMIZE PROPERTY STRINGS AUTO ON OFF)
if(NOT KVX_CUDA_OPTIMIZE MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "KVX_CUDA_OPTIMIZE is '${KVX_CUDA_OPTIMIZE}'; expected AUTO, ON or OFF")
endif()

# kvx_cuda_target_option(TARGET VARIABLE): nvcc's option for one of them.
function(kvx_cuda_target_option target variable)
  if(target MATCHES "^([0-9]+[af]?)$")
    set(option arch=compute_${target},code=sm_${target})
  elseif(target MATCHES "^([0-9]+)-virtual$")
    set(option arch=compute_${CMAKE_MATCH_1},code=compute_${CMAKE_MATCH_1})
  elseif(target MATCHES "^([0-9]+)-on-([0-9]+)$")
    set(option arch=compute_${CMAKE_MATCH_1},code=sm_${CMAKE_MATCH_2})
  else()
    message(FATAL_ERROR "KVX_CUDA_TARGETS has '${target}'; expected 90a, 80-virtual or 80-on-90")
  endif()
  set(${variable} -gencode=${option} PARENT_SCOPE)
endfunction()

# kvx_sort_cuda_targets(): KVX_CUDA_TARGETS as nvcc's options. kvx_gencode has those of every source.
# Devices of 8.9, 10.x and 12.x also run what is there for 8.0, the first its machine code, the others
# its PTX: where a build has that, their own code is left to the sources that gain by it
# (kvx_add_cuda_targets), as kvx_gencode_89 and kvx_gencode_family.
function(kvx_sort_cuda_targets)
  set(options "")
  set(options_89 "")
  set(options_family "")
  foreach(target IN LISTS KVX_CUDA_TARGETS)
    kvx_cuda_target_option(${target} option)
    if(target STREQUAL "89" AND "80" IN_LIST KVX_CUDA_TARGETS)
      list(APPEND options_89 ${option})
    elseif(target MATCHES "^1[02]0f$" AND "80-virtual" IN_LIST KVX_CUDA_TARGETS)
      list(APPEND options_family ${option})
    else()
      list(APPEND options ${option})
    endif()
  endforeach()
  set(kvx_gencode ${options} PARENT_SCOPE)
  set(kvx_gencode_89 ${options_89} PARENT_SCOPE)
  set(kvx_gencode_family ${options_family} PARENT_SCOPE)
endfunction()

# kvx_find_cuda_optimization(): what came of KVX_CUDA_OPTIMIZE, as KVX_CUDA_IS_OPTIMIZED.
function(kvx_find_cuda_optimization)
  set(KVX_CUDA_IS_OPTIMIZED ON)
  if(KVX_CUDA_OPTIMIZE STREQUAL "OFF" OR (KVX_CUDA_OPTIMIZE STREQUAL "AUTO"
                                          AND NOT EXISTS /dev/nvidiactl))
    check_compiler_flag(CUDA -Ofc=max KVX_NVCC_COMPILES_FAST)  # not before CUDA 12.9
    if(KVX_NVCC_COMPILES_FAST)
      set(KVX_CUDA_IS_OPTIMIZED OFF)
    endif()
  endif()
  set(KVX_CUDA_IS_OPTIMIZED ${KVX_CUDA_IS_OPTIMIZED} PARENT_SCOPE)
endfunction()

set(KVX_HAS_CUDA OFF)
set(KVX_CUDA_IS_OPTIMIZED ON)
set(KVX_CUDA_SUMMARY "not built")  # what kvx info says
if(NOT KVX_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  include(CheckCompilerFlag)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(nvcc nvcc PATHS /usr/local/cuda/bin)
    if(nvcc)
      set(CMAKE_CUDA_COMPILER ${nvcc})
    endif()
  endif()
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  if(NOT CMAKE_CUDA_COMPILER)
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES OFF)  # named below: CMake 3.25 would add PTX to 90a
    enable_language(CUDA)
    # CMake 3.25 does not know that nvcc has C++20.
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    find_package(CUDAToolkit 12.4 REQUIRED)
    set(KVX_HAS_CUDA ON)
    kvx_sort_cuda_targets()
    list(JOIN KVX_CUDA_TARGETS " " kvx_targets)
    kvx_find_cuda_optimization()
    # Many instances of one kernel are alike: for size, a ninth of what the default compression
    # leaves, which is a third of the time of compiling without optimisation.
    check_compiler_flag(CUDA --compress-mode=size KVX_NVCC_HAS_COMPRESS_MODE)  # not before 12.8
    if(KVX_NVCC_HAS_COMPRESS_MODE AND KVX_CUDA_IS_OPTIMIZED)
      set(kvx_compression --compress-mode=size)
    elseif(KVX_NVCC_HAS_COMPRESS_MODE)
      set(kvx_compression --compress-mode=speed)
    else()
      set(kvx_compression -Xfatbin=-compress-all)
    endif()
    set(KVX_CUDA_SUMMARY "nvcc ${CMAKE_CUDA_COMPILER_VERSION}, kernels for ${kvx_targets}")
    if(NOT KVX_CUDA_IS_OPTIMIZED)
      string(APPEND KVX_CUDA_SUMMARY ", NOT OPTIMISED (KVX_CUDA_OPTIMIZE is ${KVX_CUDA_OPTIMIZE})")
      install(CODE "message(WARNING \"This build is not for use: CUDA ${KVX_CUDA_SUMMARY}\")"
              ALL_COMPONENTS)
    endif()
    message(STATUS "KVX_CUDA: ${KVX_CUDA_SUMMARY}")
  elseif(KVX_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KVX_CUDA is ON, but nvcc was not found (CUDACXX or CMAKE_CUDA_COMPILER "
                        "may name it)")
  else()
    message(STATUS "KVX_CUDA: nvcc not found, building without the CUDA backend")
  endif()
else()
  message(STATUS "KVX_CUDA: OFF, building without the CUDA backend")
endif()

set(CMAKE_CUDA_VISIBILITY_PRESET ${kvx_visibility})

# Options of a target of CUDA sources.
function(kvx_set_cuda_options target)
  # fmt 9 takes nvcc for a compiler without constexpr.
  target_compile_definitions(${target} PRIVATE FMT_USE_CONSTEXPR=1)
  set(unless_release $<NOT:$<CONFIG:Release>>)
  set(warnings -Wall,-Wextra,$<${unless_release}:-Werror$<COMMA>>-Wno-unused-parameter)
  target_compile_options(
    ${target}
    PRIVATE ${kvx_gencode} --expt-relaxed-constexpr ${kvx_compression}
            $<${unless_release}:-Werror=all-warnings> $<${unless_release}:-lineinfo>
            -Xcompiler=${warnings},-fvisibility=${kvx_visibility}
            -Xcudafe=--display_error_number)
endfunction()

# kvx_add_cuda_targets(89|family <file>...): sources of kernels that have code of their own for 8.9, or
# for the families 10 and 12; must be called in the directory that makes their target.
function(kvx_add_cuda_targets which)
  foreach(source IN LISTS ARGN)
    get_filename_component(path ${source} ABSOLUTE)
    if(NOT EXISTS ${path})
      message(FATAL_ERROR "${path} shall have CUDA code for ${which}, but is not there")
    endif()
    set_property(SOURCE ${path} APPEND PROPERTY COMPILE_OPTIONS ${kvx_gencode_${which}})
  endforeach()
endfunction()

# kvx_set_cuda_optimization(TARGET <file>...): a target's sources of kernels are compiled as
# KVX_CUDA_OPTIMIZE says; must be called in the directory that makes the target. Without optimisation
# ptxas has to tear wgmma's chains apart, and its advice about that is left out; with it, the advice is
# an error.
function(kvx_set_cuda_optimization target)
  set(launcher refuse_torn_wgmma.sh)
  if(NOT KVX_CUDA_IS_OPTIMIZED)
    set(launcher without_wgmma_advice.sh)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -Ofc=max)
  endif()
  set_property(TARGET ${target} PROPERTY
               RULE_LAUNCH_COMPILE "\"${PROJECT_SOURCE_DIR}/cmake/${launcher}\"")
endfunction()
