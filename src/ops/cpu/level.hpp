// KVX_CPU_LEVEL names the inline namespace around every kernel template. A template compiled for
// two levels under one name would link to one copy and run illegal instructions; under two names it
// cannot.
#pragma once

// Code outside the level files (a test with a format of its own) compiles for the build's target.
#ifndef KVX_CPU_LEVEL
#define KVX_CPU_LEVEL level_of_build
#endif
