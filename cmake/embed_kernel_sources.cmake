# cmake -DOUTPUT=table.cpp "-DSOURCES=a.cl;b.clh" -P embed_kernel_sources.cmake: a table of the files' names and texts.
set(entries "")
foreach(source ${SOURCES})
  get_filename_component(name "${source}" NAME)
  file(READ "${source}" text)
  string(APPEND entries "    {\"${name}\", R\"source(${text})source\"},\n")
endforeach()
file(WRITE "${OUTPUT}" "#include \"backends/opencl/kernel_source.h\"

namespace quern::opencl {

std::span<const SourceFile> source_files() {
  static constexpr SourceFile kFiles[] = {
${entries}  };
  return kFiles;
}

}  // namespace quern::opencl
")
