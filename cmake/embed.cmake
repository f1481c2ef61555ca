# Files as bytes of the program. Used twice: included, it brings quern_embed(); run as a script (cmake -P) it writes one source file.

# Adds to `target` a source that defines `const std::span<const quern::EmbeddedFile> quern::NAME` over FILES, sorted as given, with paths
# relative to FOLDER. HEADER declares it.
function(quern_embed target)
  cmake_parse_arguments(EMBED "" "NAME;NAMESPACE;HEADER;FOLDER" "FILES" ${ARGN})
  set(output "${CMAKE_CURRENT_BINARY_DIR}/${EMBED_NAME}.cpp")
  set(script "${PROJECT_SOURCE_DIR}/cmake/embed.cmake")
  string(REPLACE ";" "," files "${EMBED_FILES}")
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${CMAKE_COMMAND}" "-DOUTPUT=${output}" "-DNAME=${EMBED_NAME}" "-DNAMESPACE=${EMBED_NAMESPACE}" "-DHEADER=${EMBED_HEADER}"
            "-DFOLDER=${EMBED_FOLDER}" "-DFILES=${files}" -P "${script}"
    DEPENDS ${EMBED_FILES} "${script}"
    COMMENT "Embedding ${EMBED_NAME}"
    VERBATIM)
  target_sources(${target} PRIVATE "${output}")
endfunction()

if(CMAKE_SCRIPT_MODE_FILE)
  string(REPLACE "," ";" FILES "${FILES}")
  set(arrays "")
  set(entries "")
  set(index 0)
  foreach(file ${FILES})
    file(READ "${file}" bytes HEX)
    file(SHA256 "${file}" hash)
    string(SUBSTRING "${hash}" 0 16 hash)
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
    string(REGEX REPLACE "(................................................................................)" "\\1\n    " bytes "${bytes}")
    file(RELATIVE_PATH path "${FOLDER}" "${file}")
    string(APPEND arrays "constexpr unsigned char kFile${index}[] = {\n    ${bytes}};\n\n")
    string(APPEND entries "    {\"${path}\", \"${hash}\", {reinterpret_cast<const char*>(kFile${index}), sizeof kFile${index}}},\n")
    math(EXPR index "${index} + 1")
  endforeach()
  file(WRITE "${OUTPUT}" "// Made by cmake/embed.cmake.\n#include \"${HEADER}\"\n\nnamespace ${NAMESPACE} {\nnamespace {\n\n${arrays}"
    "const EmbeddedFile kFiles[] = {\n${entries}};\n\n}  // namespace\n\nconst std::span<const EmbeddedFile> ${NAME} = kFiles;\n\n}  // namespace ${NAMESPACE}\n")
endif()
