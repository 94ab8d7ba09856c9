/* A prefill provider that takes no time: --tokens IDS --out STATE --model MODEL

   The state of these very ids lies in the directory PACED_STATES, on the file system of STATE, under
   the name that tests/standins/paced_provider.py gives it; it is moved. Status 3 without one. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char **argv)
{
    const char *tokens = NULL, *out = NULL, *states = getenv("PACED_STATES");
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--tokens"))
            tokens = argv[i + 1];
        if (!strcmp(argv[i], "--out"))
            out = argv[i + 1];
    }
    FILE *file = tokens ? fopen(tokens, "rb") : NULL;
    if (!file || !out || !states)
        return 2;
    uint32_t table[256], crc = 0xffffffffu;
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++)
            table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0xedb88320u : 0);
    }
    size_t count = 0;
    for (int byte; (byte = getc(file)) != EOF; count += byte == '\n')
        crc = crc >> 8 ^ table[(crc ^ (uint32_t)byte) & 255];
    char state[4096];
    snprintf(state, sizeof state, "%s/%zu-%08x", states, count, ~crc);
    if (rename(state, out)) {
        fprintf(stderr, "no state was saved for these %zu ids\n", count);
        return 3;
    }
    return 0;
}
