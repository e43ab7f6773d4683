# Language, warnings, sanitizers and where things go, for every target.

set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# bin/ and lib/ below the build folder, as after an installation, and found from each other wherever the pair is put.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
file(RELATIVE_PATH CAIRN_BIN_TO_LIB ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
set(CMAKE_BUILD_RPATH_USE_ORIGIN ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN/${CAIRN_BIN_TO_LIB}")

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# Release is -O3: the inner loops of the dynamic programs are minima over rows, and gcc 12 vectorises those at -O3 only.
add_library(cairn_warnings INTERFACE)
target_compile_options(cairn_warnings INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wshadow)
if(CAIRN_WERROR)
  target_compile_options(cairn_warnings INTERFACE -Werror)
endif()

# Answers are the same on every machine: no a * b + c in one rounding, which clang makes by default where it can.
include(CheckCCompilerFlag)
check_c_compiler_flag(-ffp-contract=off CAIRN_HAS_FP_CONTRACT)
if(CAIRN_HAS_FP_CONTRACT)
  add_compile_options(-ffp-contract=off)
endif()

if(CAIRN_SANITIZE)
  add_compile_options(-fsanitize=${CAIRN_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${CAIRN_SANITIZE})
endif()
if(CAIRN_FUZZ)
  if(NOT CMAKE_C_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "CAIRN_FUZZ needs clang: configure with -DCMAKE_C_COMPILER=clang")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
