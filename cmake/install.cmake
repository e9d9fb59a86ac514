# Install and export: find_package(ffpa), pkg-config, and the flat layout of the wheel. SPDX-License-Identifier: Apache-2.0
if(SKBUILD)
  set(targets ffpa)
  if(TARGET ffpa_torch)
    list(APPEND targets ffpa_torch)
  endif()
  install(TARGETS ${targets} LIBRARY DESTINATION ffpa COMPONENT python)
  return()
endif()

include(CMakePackageConfigHelpers)
install(TARGETS ffpa EXPORT ffpaTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/ffpa DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/ffpa)
install(EXPORT ffpaTargets NAMESPACE ffpa:: DESTINATION ${package_folder})
configure_package_config_file(cmake/ffpaConfig.cmake.in ffpaConfig.cmake INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file(ffpaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ffpaConfig.cmake ${PROJECT_BINARY_DIR}/ffpaConfigVersion.cmake
        DESTINATION ${package_folder})
file(RELATIVE_PATH pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)  # the installed tree may be moved
configure_file(cmake/ffpa.pc.in ffpa.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/ffpa.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
