# Included by the CMake build of llama.cpp (CMAKE_PROJECT_INCLUDE in config.toml), which takes half as long with it.
if(PROJECT_NAME STREQUAL "llama.cpp")
    # llama-cpp-2 enables the library of llama.cpp's command-line tools by default; Thunder does not use it.
    set(LLAMA_BUILD_COMMON OFF CACHE BOOL "" FORCE)

    # The many small files of the image encoders all parse the same headers: compile 12 at a time, as libllama does.
    function(join_image_encoders)
        if(TARGET mtmd)
            set(helpers tools/mtmd/mtmd-helper.cpp tools/mtmd/mtmd-helper-gen.cpp)
            list(TRANSFORM helpers PREPEND "${CMAKE_SOURCE_DIR}/")
            set_target_properties(mtmd PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
            set_source_files_properties(${helpers} TARGET_DIRECTORY mtmd PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
        endif()
    endfunction()
    if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.19)
        cmake_language(DEFER CALL join_image_encoders)
    endif()
endif()
