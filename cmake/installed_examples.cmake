# The examples on an installed kvx: cmake -S . -B build && cmake --build build
cmake_minimum_required(VERSION 3.22)
project(kvx_examples LANGUAGES C CXX)
find_package(kvx 1.2 REQUIRED)

foreach(example quantized_pages owned_cache)
  add_executable(${example}_c ${example}.c)
  target_link_libraries(${example}_c PRIVATE kvx::kvx m)
  set_target_properties(${example}_c PROPERTIES C_STANDARD 99)
  add_executable(${example}_cpp ${example}.cpp)
  target_link_libraries(${example}_cpp PRIVATE kvx::kvx)
endforeach()

# With nvcc, unless -DWITH_CUDA=OFF.
option(WITH_CUDA "build quantized_pages.cu where nvcc is found" ON)
include(CheckLanguage)
if(WITH_CUDA)
  check_language(CUDA)
endif()
if(CMAKE_CUDA_COMPILER)
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 80)  # the example has no kernel of its own
  endif()
  enable_language(CUDA)
  add_executable(quantized_pages_cu quantized_pages.cu)
  target_link_libraries(quantized_pages_cu PRIVATE kvx::kvx)
endif()
