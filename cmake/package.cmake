# `cpack -G DEB` in the build folder makes a Debian package of what was built; it computes what the program depends on with dpkg-shlibdeps.

# What is packaged was built before: a package of the program does not need every test.
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)

include(GNUInstallDirs)
install(FILES "${PROJECT_SOURCE_DIR}/packaging/grafana/quern.json" DESTINATION ${CMAKE_INSTALL_DATADIR}/quern/grafana)
install(FILES "${PROJECT_SOURCE_DIR}/packaging/haproxy/quern.cfg" DESTINATION ${CMAKE_INSTALL_DATADIR}/quern/haproxy)
install(FILES "${PROJECT_SOURCE_DIR}/packaging/prometheus/quern.rules.yml" DESTINATION ${CMAKE_INSTALL_DATADIR}/quern/prometheus)
install(FILES "${PROJECT_SOURCE_DIR}/packaging/systemd/quern.service" DESTINATION lib/systemd/system)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME quern)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_VENDOR quern)
set(CPACK_PACKAGE_CONTACT "quern developers <quern@localhost.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "server of language models of the Qwen3.5 and 3.6 family")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
"Serves hybrid models (Gated DeltaNet and attention) over an OpenAI-compatible
HTTP API, in FP8, from Hugging Face checkpoints as they are. One native program:
no Python at run time. Comes with a systemd unit that is neither enabled nor
started, and a Grafana dashboard.")
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS ca-certificates)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "ocl-icd-libopencl1, openmpi-bin, prometheus, grafana")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(debian "${PROJECT_SOURCE_DIR}/packaging/debian")
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA "${debian}/postinst;${debian}/prerm;${debian}/postrm;${debian}/conffiles")
# Files outside the prefix, and Debian's copyright file: put in place by a script, so that `cmake --install` leaves /etc alone.
set(CPACK_PRE_BUILD_SCRIPTS "${PROJECT_SOURCE_DIR}/cmake/debian_files.cmake")
set(CPACK_QUERN_SOURCE_DIR "${PROJECT_SOURCE_DIR}")
include(CPack)
