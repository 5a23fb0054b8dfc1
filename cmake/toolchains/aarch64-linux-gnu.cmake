# 64-bit Arm Linux, compiled on another machine by Debian's cross compiler (preset arm and ./dev
# wheel --arm). Libraries come from build/arm64-root, which both fill (tools/packages.arm64);
# programs run under qemu-user.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)

get_filename_component(root ${CMAKE_CURRENT_LIST_DIR}/../../build/arm64-root ABSOLUTE)
set(CMAKE_FIND_ROOT_PATH ${root})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_LIBDIR} ${root}/usr/lib/aarch64-linux-gnu/pkgconfig)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${root})

# The compiler's own folders hold C and C++'s libraries and no others.
set(includes "-isystem ${root}/usr/include -isystem ${root}/usr/include/aarch64-linux-gnu")
set(CMAKE_C_FLAGS_INIT ${includes})
set(CMAKE_CXX_FLAGS_INIT ${includes})
set(links "")
foreach(folder ${root}/usr/lib/aarch64-linux-gnu ${root}/lib/aarch64-linux-gnu)
  string(APPEND links " -Wl,-rpath-link,${folder}")
  if(NOT SKBUILD)  # a wheel's libraries lie where auditwheel puts them
    string(APPEND links " -Wl,-rpath,${folder}")
  endif()
endforeach()
foreach(kind EXE SHARED MODULE)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT "${links}")
endforeach()

set(CMAKE_CROSSCOMPILING_EMULATOR ${CMAKE_CURRENT_LIST_DIR}/../../tools/dev/run_arm64.sh)
