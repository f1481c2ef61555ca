# Run by cpack on the staged files.
function(place source target)
  get_filename_component(folder "${target}" DIRECTORY)
  file(MAKE_DIRECTORY "${folder}")
  configure_file("${source}" "${target}" COPYONLY)
  file(CHMOD "${target}" PERMISSIONS OWNER_READ OWNER_WRITE GROUP_READ WORLD_READ)
  file(CHMOD "${folder}" PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
endfunction()

set(root "${CPACK_TEMPORARY_INSTALL_DIRECTORY}")
place("${CPACK_QUERN_SOURCE_DIR}/packaging/systemd/quern.default" "${root}/etc/default/quern")
place("${CPACK_QUERN_SOURCE_DIR}/LICENSE" "${root}/usr/share/doc/quern/copyright")
file(REMOVE "${root}/usr/share/doc/quern/LICENSE")

file(GLOB pages "${root}/usr/share/man/man1/*.1")
if(pages)
  execute_process(COMMAND gzip -9n ${pages} COMMAND_ERROR_IS_FATAL ANY)
endif()
