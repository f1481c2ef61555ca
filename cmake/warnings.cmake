add_library(quern_warnings INTERFACE)
target_compile_options(quern_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wno-missing-field-initializers
    -Werror=switch -Werror=return-type -Werror=unused-result>)
if(QUERN_WERROR)
  target_compile_options(quern_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
