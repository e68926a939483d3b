/* Both libraries where the words that system headers take are taken: near, far, min, max, small and interface by
   windows.h, I by complex.h, unix and linux by GNU compilers, slots, signals, emit and foreach by Qt, the rest by
   X11. */
#define near
#define far
#define NEAR
#define FAR
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define small char
#define hyper long
#define interface struct
#define IN
#define OUT
#define OPTIONAL
#define CALLBACK
#define I _Complex_I
#define slots
#define signals public
#define emit
#define foreach for
#undef unix
#define unix 1
#undef linux
#define linux 1
#define VOID void
#define CONST const
#define ERROR 0
#define DELETE 1
#define Bool int
#define Status int
#define None 0
#define True 1
#define False 0
#define Success 0
#define Always 2

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
#define CHUNKFLOW_TUNE_IMPLEMENTATION
#include "tools/chunkflow_tune.h"

int main(void) {
    return CF_OK;
}
