import java.nio.charset.StandardCharsets;
import java.util.*;
import java.io.*;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.*;

/** A line in: expression, then names and values, all in base64 and apart by blanks. A line out: what RocketMQ says. */
public class FilterEvaluator {
    static String text(String piece) {
        return new String(Base64.getDecoder().decode(piece), StandardCharsets.UTF_8);
    }

    static String outcome(String[] pieces) {
        Expression expression;
        try {
            expression = FilterFactory.INSTANCE.get("SQL92").compile(text(pieces[0]));
        } catch (Throwable refused) {
            return "refused";
        }
        Map<String, String> properties = new HashMap<>();
        for (int i = 1; i + 1 < pieces.length; i += 2) {
            properties.put(text(pieces[i]), text(pieces[i + 1]));
        }
        try {
            Object value = expression.evaluate(new EvaluationContext() {
                public Object get(String name) { return properties.get(name); }
                public Map<String, Object> keyValues() { return new HashMap<>(properties); }
            });
            return String.valueOf(value);
        } catch (Throwable failed) {
            return "failed";
        }
    }

    public static void main(String[] arguments) throws IOException {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        for (String line; (line = lines.readLine()) != null; ) {
            System.out.println(outcome(line.split(" ")));
        }
    }
}
