package cdp

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/coder/websocket"
)

// BenchmarkRoundTrip compares a small command's way to a real Chrome through
// the broker with the way straight to it.
func BenchmarkRoundTrip(b *testing.B) {
	r, s := chromium(b)
	e, err := s.Endpoint(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	for name, url := range map[string]string{
		"direct": "ws://" + e.Addr + e.Path,
		"broker": "ws" + strings.TrimPrefix(r.url, "http") + "/cdp",
	} {
		b.Run(name, func(b *testing.B) {
			c, _, err := websocket.Dial(context.Background(), url, nil)
			if err != nil {
				b.Fatal(err)
			}
			defer c.CloseNow()
			i := 0
			for b.Loop() {
				i++
				msg := fmt.Sprintf(`{"id":%d,"method":"Target.getTargets"}`, i)
				if err := c.Write(context.Background(), websocket.MessageText, []byte(msg)); err != nil {
					b.Fatal(err)
				}
				if _, _, err := c.Read(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
