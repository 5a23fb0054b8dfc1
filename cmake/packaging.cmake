# cmake --install: the tool, and as the component kvx the shared library, its headers, a CMake
# package and a pkg-config file.
include(CMakePackageConfigHelpers)

install(TARGETS kvx EXPORT kvx-targets COMPONENT kvx
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} NAMELINK_COMPONENT kvx)
install(DIRECTORY include/kvx DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT kvx)

foreach(tool kvx_tool kvx_conformance)
  if(TARGET ${tool})
    install(TARGETS ${tool} COMPONENT tools)
  endif()
endforeach()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvx)
install(EXPORT kvx-targets NAMESPACE kvx:: DESTINATION ${package_dir} COMPONENT kvx)
configure_package_config_file(cmake/kvx-config.cmake.in kvx-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(kvx-config-version.cmake COMPATIBILITY SameMinorVersion)
file(RELATIVE_PATH pc_includedir /prefix/${CMAKE_INSTALL_LIBDIR}
     /prefix/${CMAKE_INSTALL_INCLUDEDIR})
configure_file(cmake/kvx.pc.in kvx.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/kvx-config.cmake ${PROJECT_BINARY_DIR}/kvx-config-version.cmake
        DESTINATION ${package_dir} COMPONENT kvx)
install(FILES ${PROJECT_BINARY_DIR}/kvx.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
        COMPONENT kvx)
