# Windows or macOS, compiled on Linux by PyPI's ziglang (presets windows and macos). KVX_SYSTEM is
# windows or macos; build/cross/<system> holds the compilers and the libraries, which
# tools/dev/cross.sh fills.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES KVX_SYSTEM)
get_filename_component(cross ${CMAKE_CURRENT_LIST_DIR}/../../build/cross/${KVX_SYSTEM} ABSOLUTE)
if(KVX_SYSTEM STREQUAL "windows")
  set(CMAKE_SYSTEM_NAME Windows)
  set(CMAKE_SYSTEM_PROCESSOR x86_64)
  set(CMAKE_RC_COMPILER ${cross}/bin/rc)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${CMAKE_CURRENT_LIST_DIR}/../../tools/dev/run_windows.sh)
elseif(KVX_SYSTEM STREQUAL "macos")
  set(CMAKE_SYSTEM_NAME Darwin)
  set(CMAKE_SYSTEM_PROCESSOR arm64)
  set(CMAKE_INSTALL_NAME_TOOL /bin/false)  # an installation that needs it fails
else()
  message(FATAL_ERROR "KVX_SYSTEM is '${KVX_SYSTEM}', expected windows or macos")
endif()
set(CMAKE_C_COMPILER ${cross}/bin/clang)
set(CMAKE_CXX_COMPILER ${cross}/bin/clang++)
set(CMAKE_AR ${cross}/bin/ar CACHE FILEPATH "")
set(CMAKE_RANLIB ${cross}/bin/ranlib CACHE FILEPATH "")

set(CMAKE_FIND_ROOT_PATH ${cross}/root)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# The compiler knows its own folders and no others.
foreach(language C CXX)
  set(CMAKE_${language}_FLAGS_INIT "-isystem ${cross}/root/include")
endforeach()
