import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.SplittableRandom;
import java.util.zip.CRC32;

/**
 * Bodies with a stamp in front: intended time, sequence, producer, seed, CRC of the rest, CRC of the
 * first 28 bytes; little-endian. The rest comes from a pool, half of it random and half zeros.
 */
final class Bodies {
    static final int STAMP_BYTES = 32;
    private static final int LARGE_BYTES = 16 << 10;

    private final int size;
    private final int seed;
    private final byte[][] pool;
    private final int[] restCrc;

    Bodies(int size, long seed) {
        if (size < STAMP_BYTES) {
            throw new IllegalArgumentException("a body has at least " + STAMP_BYTES + " bytes");
        }
        this.size = size;
        this.seed = (int) seed;
        pool = new byte[size > LARGE_BYTES ? 100 : 1000][];
        restCrc = new int[pool.length];
        SplittableRandom random = new SplittableRandom(seed);
        for (int i = 0; i < pool.length; i++) {
            byte[] noise = new byte[(size - STAMP_BYTES + 1) / 2];
            random.nextBytes(noise);
            pool[i] = new byte[size];
            System.arraycopy(noise, 0, pool[i], STAMP_BYTES, noise.length);
            restCrc[i] = crc(pool[i], STAMP_BYTES, size - STAMP_BYTES);
        }
    }

    byte[] make(long intended, long sequence, int producer) {
        int which = (int) (sequence % pool.length);
        byte[] body = pool[which].clone();
        ByteBuffer stamp = ByteBuffer.wrap(body).order(ByteOrder.LITTLE_ENDIAN);
        stamp.putLong(0, intended).putLong(8, sequence).putInt(16, producer).putInt(20, seed);
        stamp.putInt(24, restCrc[which]);
        stamp.putInt(28, crc(body, 0, 28));
        return body;
    }

    static int crc(byte[] bytes, int from, int length) {
        CRC32 crc = new CRC32();
        crc.update(bytes, from, length);
        return (int) crc.getValue();
    }
}
