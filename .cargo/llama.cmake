# Included by the CMake build of llama.cpp (CMAKE_PROJECT_INCLUDE in config.toml), which takes half as long with it.
if(PROJECT_NAME STREQUAL "llama.cpp")
    # llama-cpp-2 enables the library of llama.cpp's command-line tools by default; Thunder does not use it.
    set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)
    # The many small files of the image encoders all parse the same headers: compile 12 at a time, as libllama does.
    if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.19)
        set(helpers ${CMAKE_CURRENT_SOURCE_DIR}/tools/mtmd/mtmd-helper.cpp ${CMAKE_CURRENT_SOURCE_DIR}/tools/mtmd/mtmd-helper-gen.cpp)
        cmake_language(DEFER CALL set_target_properties mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
        cmake_language(DEFER CALL set_source_files_properties ${helpers} TARGET_DIRECTORY mtmd PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
endif()
