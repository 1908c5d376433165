package session

import "testing"

func TestSizesAsText(t *testing.T) {
	var s Sizes
	if err := s.UnmarshalText([]byte("browser=2x4, shell=1x8")); err != nil {
		t.Fatal(err)
	}
	if s[Browser] != (Size{2, 4}) || s[Shell] != (Size{1, 8}) || s[Both] != DefaultSizes[Both] {
		t.Errorf("sizes %v", s)
	}
	if err := s.UnmarshalText(nil); err != nil || s[Browser] != DefaultSizes[Browser] {
		t.Errorf("empty text gives %v, %v", s, err)
	}
	for _, bad := range []string{"browser", "browser=", "browser=2", "browser=0x1", "browser=1x0", "browser=-1x2", "browser=1x2x3", "phone=1x1", "browser=1x99999", "browser=1 x 2", "browser=1x2;shell=1x1"} {
		if err := s.UnmarshalText([]byte(bad)); err == nil {
			t.Errorf("%q was taken as %v", bad, s)
		}
	}
}
