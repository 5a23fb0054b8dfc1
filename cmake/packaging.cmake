# cmake --install: the tools, and as the component kvx the shared library, its headers, a CMake
# package, a pkg-config file, the documentation with the licence, and the examples.
include(CMakePackageConfigHelpers)

# One version: the package's is that of the C ABI in the header (docs/versioning.md).
file(STRINGS include/kvx/kvx_abi.h lines REGEX "^#define KVX_ABI_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX MATCHALL "[0-9]+" abi_version "${lines}")
list(JOIN abi_version "." abi_version)
if(NOT PROJECT_VERSION STREQUAL abi_version)
  message(FATAL_ERROR "project(kvx VERSION ${PROJECT_VERSION}), but include/kvx/kvx_abi.h is version "
                      "${abi_version}; both are one version (docs/versioning.md)")
endif()

# kvx.hpp needs C++17; a C program links the same target.
target_compile_features(kvx INTERFACE cxx_std_17)

# A wheel holds no symbolic links: there the library is one file, named by its soname.
set(kvx_link_option -lkvx)
if(DEFINED SKBUILD)
  set_target_properties(kvx PROPERTIES VERSION ${PROJECT_VERSION_MAJOR})
  set(kvx_link_option -l:libkvx.so.${PROJECT_VERSION_MAJOR})
  install(TARGETS kvx EXPORT kvx-targets COMPONENT kvx
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP)
else()
  install(TARGETS kvx EXPORT kvx-targets COMPONENT kvx
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_COMPONENT kvx)
endif()
# Components lie beside the library, which opens them by name (components/).
set_target_properties(kvx PROPERTIES INSTALL_RPATH "$ORIGIN")
foreach(component kvx_observe kvx_transfer)
  if(TARGET ${component})
    install(TARGETS ${component} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_SKIP
            COMPONENT kvx)
  endif()
endforeach()
install(DIRECTORY include/kvx DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT kvx)

foreach(tool kvx_tool kvx_conformance)
  if(TARGET ${tool})
    if(NOT DEFINED SKBUILD)
      set_target_properties(${tool} PROPERTIES INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
    endif()
    install(TARGETS ${tool} COMPONENT tools)
  endif()
endforeach()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvx)
install(EXPORT kvx-targets NAMESPACE kvx:: DESTINATION ${package_dir} COMPONENT kvx)
configure_package_config_file(cmake/kvx-config.cmake.in kvx-config.cmake
                              INSTALL_DESTINATION ${package_dir})
# find_package(kvx 1.1) accepts 1.2, which only adds to it; 2.0 and 1.3 are refused.
write_basic_package_version_file(kvx-config-version.cmake COMPATIBILITY SameMajorVersion)
file(RELATIVE_PATH pc_includedir /prefix/${CMAKE_INSTALL_LIBDIR}
     /prefix/${CMAKE_INSTALL_INCLUDEDIR})
configure_file(cmake/kvx.pc.in kvx.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/kvx-config.cmake ${PROJECT_BINARY_DIR}/kvx-config-version.cmake
        DESTINATION ${package_dir} COMPONENT kvx)
install(FILES ${PROJECT_BINARY_DIR}/kvx.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
        COMPONENT kvx)

if(DEFINED SKBUILD)  # pages and examples are the repository's, not a wheel's
  return()
endif()
install(FILES README.md LICENSE CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT kvx)
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT kvx)
install(DIRECTORY examples/ DESTINATION ${CMAKE_INSTALL_DATADIR}/kvx/examples COMPONENT kvx
        PATTERN "__pycache__" EXCLUDE PATTERN "CMakeLists.txt" EXCLUDE)
install(FILES ${PROJECT_SOURCE_DIR}/cmake/installed_examples.cmake
        DESTINATION ${CMAKE_INSTALL_DATADIR}/kvx/examples COMPONENT kvx RENAME CMakeLists.txt)
