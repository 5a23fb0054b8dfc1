# Writes SOURCE's bytes into OUTPUT as the C++ definition of kvx::tool::SYMBOL (see embedded.hpp).
#   cmake -DSOURCE=page.html -DOUTPUT=page.cpp -DSYMBOL=report_page -P embed.cmake
file(READ ${SOURCE} hex HEX)
string(LENGTH "${hex}" hex_length)
math(EXPR size "${hex_length} / 2")
string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
string(REGEX REPLACE "(................................................................................)"
                     "\\1\n" bytes "${bytes}")
file(WRITE ${OUTPUT} "#include \"tools/kvx/embedded.hpp\"

namespace {
const unsigned char kBytes[${size}] = {
${bytes}
};
}  // namespace

std::string_view kvx::tool::${SYMBOL}() {
  return {reinterpret_cast<const char*>(kBytes), ${size}};
}
")
