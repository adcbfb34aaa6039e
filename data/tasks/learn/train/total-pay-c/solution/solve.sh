sqlite3 c.db 'select sum(pay) from t' > answer.txt
