# kvx_add_test: one GoogleTest binary, one line in ctest. It links kvx_core, GoogleMock, RapidCheck
# and nlohmann-json.
#
#   kvx_add_test(cache_test block_pool_test.cpp LIBS kvx_core [LABELS threaded] [GPU])
#
# Building the target tests_<label> builds what ctest -L <label> runs.
#
# One process a binary, not one a test case, keeps ctest fast; the cases are counted from the XML
# reports (tools/dev/count_tests.py). A skipped case fails its binary, unless the test says GPU:
# those are counted and shown.
if(NOT BUILD_TESTING)
  return()
endif()

find_package(GTest 1.12 REQUIRED)
find_package(rapidcheck REQUIRED)
find_package(nlohmann_json 3.11 REQUIRED)
set(KVX_TEST_REPORTS ${CMAKE_BINARY_DIR}/test-reports)

# The headers are compiled with the first test's options, which are every test's.
function(kvx_precompile_test_headers name)
  get_property(owner GLOBAL PROPERTY kvx_test_headers_owner)
  if(owner)
    kvx_precompile_headers(${name} REUSE_FROM ${owner})
  else()
    kvx_precompile_headers(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/precompiled.hpp)
    set_property(GLOBAL PROPERTY kvx_test_headers_owner ${name})
  endif()
endfunction()

function(kvx_add_test name)
  cmake_parse_arguments(arg "GPU" "" "LIBS;LABELS" ${ARGN})
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE kvx_core ${arg_LIBS} GTest::gmock GTest::gtest_main
                        rapidcheck nlohmann_json::nlohmann_json)
  target_compile_definitions(${name} PRIVATE KVX_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  kvx_precompile_test_headers(${name})
  add_test(NAME ${name} COMMAND ${name} --gtest_output=xml:${KVX_TEST_REPORTS}/${name}.xml)
  if(arg_GPU)
    list(APPEND arg_LABELS gpu)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}")
  foreach(label IN LISTS arg_LABELS)
    if(NOT TARGET tests_${label})
      add_custom_target(tests_${label})
    endif()
    add_dependencies(tests_${label} ${name})
  endforeach()
  if(NOT arg_GPU)
    set_tests_properties(${name} PROPERTIES FAIL_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
  endif()
endfunction()
