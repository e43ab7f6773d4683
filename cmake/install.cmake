# Headers, library, command line, CMake package and pkg-config file. What is installed has the name of the distribution,
# cairn-budget; what a program uses is called cairn: library, headers, target.

include(CMakePackageConfigHelpers)

set(CAIRN_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/cairn-budget)

install(DIRECTORY include/cairn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(TARGETS cairn EXPORT cairn LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
set_target_properties(cairn PROPERTIES INSTALL_RPATH "$ORIGIN")
if(TARGET cairn_cli)
  install(TARGETS cairn_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

install(EXPORT cairn NAMESPACE cairn:: FILE cairn-budget-targets.cmake DESTINATION ${CAIRN_PACKAGE_DIR})
configure_package_config_file(cmake/cairn-budget-config.cmake.in ${PROJECT_BINARY_DIR}/cairn-budget-config.cmake
  INSTALL_DESTINATION ${CAIRN_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cairn-budget-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cairn-budget-config.cmake ${PROJECT_BINARY_DIR}/cairn-budget-config-version.cmake
  DESTINATION ${CAIRN_PACKAGE_DIR})

# The prefix is found from where the file lies, so that an installation can be moved.
file(RELATIVE_PATH CAIRN_PC_TO_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" CAIRN_PC_TO_PREFIX "${CAIRN_PC_TO_PREFIX}")
configure_file(cmake/cairn-budget.pc.in ${PROJECT_BINARY_DIR}/cairn-budget.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cairn-budget.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(DEFINED SKBUILD AND CAIRN_IO)
  # A wheel runs where jansson is not installed: the shared library is carried beside ours. (Distributions build the
  # archive without -fPIC, so it cannot be linked in.)
  find_library(CAIRN_JANSSON_FILE NAMES libjansson.so.4 libjansson.so HINTS ${JANSSON_LIBRARY_DIRS} REQUIRED)
  file(REAL_PATH ${CAIRN_JANSSON_FILE} CAIRN_JANSSON_REAL)
  install(FILES ${CAIRN_JANSSON_REAL} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME libjansson.so.4)
  install(FILES /usr/share/doc/libjansson4/copyright OPTIONAL
    DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses RENAME jansson)
endif()
