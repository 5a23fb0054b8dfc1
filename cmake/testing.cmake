# kvx_add_test: one GoogleTest binary, one line in ctest. It links kvx_core, GoogleMock, RapidCheck
# and nlohmann-json.
#
#   kvx_add_test(cache_test block_pool_test.cpp LIBS kvx_core [LABELS threaded] [GPU] [SLOW]
#                [LONG] [MAY_SKIP])
#
# LONG: it starts first. SLOW: so it does, as two lines in ctest, each with every other case, which
# two processors share. Under an emulator every binary has eight lines and an hour for each.
#
# Building the target tests_<label> builds what ctest -L <label> runs.
#
# One process a binary, not one a test case, keeps ctest fast; the cases are counted from the XML
# reports (tools/dev/count_tests.py). A skipped case fails its binary, unless the test says GPU or
# MAY_SKIP, for cases that ask for instructions of some processors: those are counted and shown.
if(NOT BUILD_TESTING)
  return()
endif()

find_package(GTest 1.12 REQUIRED)
if(NOT KVX_LIBRARY_ONLY)
  find_package(rapidcheck REQUIRED)
endif()
find_package(nlohmann_json 3.11 REQUIRED)
set(KVX_TEST_REPORTS ${CMAKE_BINARY_DIR}/test-reports)

# The headers are compiled with the options of the first test of its kind, which are those of every
# test of that kind.
function(kvx_precompile_test_headers name kind)
  get_property(owner GLOBAL PROPERTY kvx_${kind}_test_headers_owner)
  if(owner)
    kvx_precompile_headers(${name} REUSE_FROM ${owner})
  else()
    kvx_precompile_headers(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/precompiled.hpp)
    set_property(GLOBAL PROPERTY kvx_${kind}_test_headers_owner ${name})
  endif()
endfunction()

# One line in ctest: the cases of one shard of a test binary.
function(kvx_add_test_run binary name labels may_skip shard num_shards)
  add_test(NAME ${name}
           COMMAND ${binary} --gtest_output=xml:${KVX_TEST_REPORTS}/${name}.xml)
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" ENVIRONMENT
                       "GTEST_TOTAL_SHARDS=${num_shards};GTEST_SHARD_INDEX=${shard}")
  if(NOT may_skip)
    set_tests_properties(${name} PROPERTIES FAIL_REGULAR_EXPRESSION "\\[  SKIPPED \\]")
  endif()
endfunction()

# What test binaries share, compiled once: kvx_add_test_support(kvx_test_support find_words.cpp)
function(kvx_add_test_support name)
  add_library(${name} STATIC ${ARGN})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE nlohmann_json::nlohmann_json)
  target_compile_definitions(${name} PRIVATE KVX_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  kvx_compile_quickly(${name})
endfunction()

function(kvx_add_test name)
  cmake_parse_arguments(arg "GPU;SLOW;LONG;MAY_SKIP" "" "LIBS;LABELS" ${ARGN})
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE kvx_core ${arg_LIBS} GTest::gmock GTest::gtest_main
                        $<TARGET_NAME_IF_EXISTS:rapidcheck> nlohmann_json::nlohmann_json)
  target_compile_definitions(${name} PRIVATE KVX_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  kvx_unite(${name})
  # At -O0 their models and references run four times as long; an emulator takes its own times.
  if(arg_SLOW AND (KVX_SANITIZE OR CMAKE_CROSSCOMPILING))
    kvx_precompile_test_headers(${name} optimized)
  else()
    kvx_compile_quickly(${name})
    kvx_precompile_test_headers(${name} quick)
  endif()
  set(may_skip FALSE)
  if(arg_GPU OR arg_MAY_SKIP)
    set(may_skip TRUE)
  endif()
  if(arg_GPU)
    list(APPEND arg_LABELS gpu)
  endif()
  foreach(label IN LISTS arg_LABELS)
    if(NOT TARGET tests_${label})
      add_custom_target(tests_${label})
    endif()
    add_dependencies(tests_${label} ${name})
  endforeach()
  set(num_shards 1)
  if(CMAKE_CROSSCOMPILING)
    set(num_shards 8)
  elseif(arg_SLOW)
    set(num_shards 2)
  endif()
  foreach(shard RANGE 1 ${num_shards})
    set(run ${name})
    if(num_shards GREATER 1)
      string(APPEND run .${shard})
    endif()
    math(EXPR index "${shard} - 1")
    kvx_add_test_run(${name} ${run} "${arg_LABELS}" ${may_skip} ${index} ${num_shards})
    if(arg_SLOW OR arg_LONG)
      set_tests_properties(${run} PROPERTIES COST 100)
    endif()
    if(CMAKE_CROSSCOMPILING)
      set_tests_properties(${run} PROPERTIES TIMEOUT 3600)
    endif()
  endforeach()
endfunction()
